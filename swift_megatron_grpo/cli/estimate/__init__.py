"""Arithmetic of a dry run: the memory of every rank, the time of a step, and settings that fit. Pure Python.

    parameters.py   parameters of a rank, from the names and shapes of a checkpoint's tensors
    activations.py  bytes that a forward pass keeps for backward
    experts.py      what expert parallelism costs
    vision_tower.py  bytes of a vision tower, and of its rows
    memory.py       memory by rank and phase
    engine.py       weights and cache of vLLM
    gpus.py         memory and speed of GPUs
    work.py         FLOPs, tokens and passes of a step
    stages.py       work of pipeline stages
    exchanges.py    seconds in which ranks send activations to each other
    throughput.py   seconds of a step
    advice.py       the nearest settings that fit

Tests: tests/unit/cli/estimate.
"""
