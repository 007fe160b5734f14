"""Implementation of benchmarks/bench.py, in the order of a run.

shapes.py       sizes of the models
lengths.py      distributions of token counts
workload.py     lengths drawn from a seed, the dataset, FLOPs of a step
checkpoints.py  makes the checkpoint of a shape where it is missing
models.py       checkpoints with random weights and a byte-level tokenizer
job.py          the file that passes a run's settings to the processes it starts
stock_server.py starts ms-swift's rollout server where tilelang is installed
free_gpus.py    refuses a GPU whose memory is in use
processes.py    starts `megatron rlhf` for each trainer and setting, and collects what was measured
instrument/     external plugin inside those processes: timers, fixed completions, fixed lengths
learning/       implementation of benchmarks/learn.py
results.py      the JSON file of a run, and the numbers derived from it
planned.py      the memory plan of a measured process, for the tests that compare both
page.py         docs/performance.md, and all files that a report writes
results_pages.py the pages of benchmarks/results
other_pages.py  tables of README.md and of other pages
own_runs.py     sections about runs of this package that are compared with each other
drift.py        series of a long run, and how far its last steps have drifted
process_tree.py host memory, open files and threads of all processes of a run
long_run_page.py the section of docs/fault_tolerance.md about long runs
draft_prices.py the table of docs/speculation.md about rows of drafts
slow_tool.py    the seconds that a slow tool takes
drafts/         implementation of benchmarks/drafts.py
markdown.py     tables of pages
chart.py        docs/performance.svg and benchmarks/results/phases.svg
busy_time.py    kernels and host functions of generation
scoring_engine.py the plain vLLM that measures the accuracy of saved weights
paths.py        paths that several benchmarks use

tests/unit/benchmarks covers this folder.
"""
