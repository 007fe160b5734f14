"""Implementation of benchmarks/bench_waits.py: rollouts with and without what keeps them from waiting.

cases.py    what is compared, with which model, and how many steps
rows.py     the dataset, whose columns decide lengths and equal rewards
commands.py the flags of a trainer and of its server
rewards.py  external plugin of all runs: rewards, an environment with a tool, one run at a time on a GPU
lengths.py  external plugin of models with random weights: each completion ends where its row says
runs.py     start a run, and read what it measured
page.py     the tables of docs/async.md and docs/choosing_settings.md

tests/unit/benchmarks/test_bench_waits.py covers this folder. benchmarks/waits_chain.sh runs it in one rental of GPUs.
"""
