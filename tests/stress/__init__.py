"""Stress tests of runs with rollout servers: real processes of `swift rollout` and `megatron rlhf`, tiny, on CPUs.

kill_servers.py     kills servers at random moments and compares the run with an undisturbed one
soak.py             runs hundreds of steps and measures how much memory every process gains
processes.py        starts, observes and kills the servers and the trainer; shared arguments of the two scripts
event_recorder.py   external plugin of the trainer: writes phases and trained completions to a file

tests/unit/stress covers the verdicts of both scripts, tests/e2e/test_survival.py runs them.
"""
