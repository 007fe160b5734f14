"""Measure a trainer from inside its process; those of `megatron rlhf` load this as an external plugin.

plugin.py     entry point of the plugin: reward, completion lengths; identical for both trainers
process.py    start and result file of every measured process, also those of benchmarks/peers
clock.py      time and peak memory of each phase of a step
vllm_pool.py  memory of a vLLM in the process, within that peak
ours.py       phases of this package's trainer
stock.py      phases of ms-swift's own trainer
sums.py       plugin of long_run.py: the reward, and torch's memory in the log

tests/unit/benchmarks covers the clock, tests/e2e/test_bench.py covers the rest.
"""
