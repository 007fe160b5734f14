"""Implementation of benchmarks/bench_experts.py, in the order of a measurement.

inputs.py   settings of a run, and weights, tokens and uneven routing drawn from a seed
ways.py     the ways to compute a block: fc1, SwiGLU and fc2
swiglu.py   the activation, by Transformer Engine's kernel on a GPU
hooks.py    a parameter per expert with the hooks of Megatron's DDP
errors.py   relative errors of a way to fp64
timing.py   times of a forward and backward on host and GPU, and the kernels that they launch
rows.py     the measurements of one way
tokens.py   the measurements of what Megatron runs around the experts

tests/unit/benchmarks/test_bench_experts.py covers what runs on a CPU.
"""
