"""Stress tests: real runs of `megatron rlhf`, with `swift rollout` or without, tiny, on CPUs.

kill_servers.py     kills servers at random moments and compares the run with an undisturbed one
faults.py           hits one training with faults of a list, and continues it after each
fault_kinds.py      that list: what each fault does, and how the run has to end
fault_runs.py       starts and observes the runs of faults.py, and accounts for their completions
soak.py             runs hundreds of steps and measures how much memory every process gains
processes.py        starts, observes and kills the servers and the trainer; shared arguments of the two scripts
event_recorder.py   external plugin of the trainer: writes phases, rollouts and trained completions to a file

tests/unit/stress covers the verdicts of the scripts, tests/e2e/test_survival.py runs them.
"""
