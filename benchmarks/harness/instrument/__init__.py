"""External plugin that measures a trainer from inside its process.

plugin.py   entry point: reward, completion lengths, memory cap, result files; identical for both trainers
clock.py    time and peak memory of each phase of a step
ours.py     phases of this package's trainer
stock.py    phases of ms-swift's own trainer

tests/unit/benchmarks covers the clock, tests/e2e/test_bench.py covers the rest.
"""
