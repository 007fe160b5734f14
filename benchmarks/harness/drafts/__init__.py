"""Implementation of benchmarks/drafts.py: runs and generation with `--speculative_rollouts history` and without.

runs.py    the tasks, the flags of a run, and what it has logged and dumped
texts.py   texts whose drafts are accepted as often as measured ones
engine.py  a process with a trainer's engine, in which requests sample these texts
page.py    the tables of docs/speculation.md

tests/unit/benchmarks/test_drafts.py covers this folder. benchmarks/drafts_chain.sh runs it in one rental of GPUs.
"""
