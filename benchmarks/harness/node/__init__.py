"""One node as users have it: the cases of benchmarks/eight.py, on all of its GPUs.

cases.py      model, workload, layouts and servers of each case, for 8, 4 or 2 GPUs
servers.py    rollout servers of a case
forecast.py   memory and time of a step, by `--check true`, before a case is measured
figures.py    the figures of a forecast
compare.py    forecasts next to what was measured
"""
