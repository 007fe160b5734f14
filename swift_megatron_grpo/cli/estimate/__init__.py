"""Arithmetic of a dry run: the memory of every rank, the time of a step, and settings that fit. Pure Python.

parameters.py   parameters of a rank, from the names and shapes of a checkpoint's tensors
activations.py  bytes that a forward pass keeps for backward, of layers and of a vision tower
audio_part.py   the same, of the audio part of a Qwen-Omni
memory.py       memory by rank and phase; weights and cache of vLLM
throughput.py   work and seconds of a step, and the pipeline stages that are most even
advice.py       the nearest settings that fit
"""
