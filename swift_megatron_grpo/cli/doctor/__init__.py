"""`swift-megatron-grpo doctor`: check packages and machine before a run, or for a bug report.

    command.py   the command
    packages.py  installed versions against the tested ranges, from this package's metadata
    machine.py   GPUs, driver, NCCL, disk, shared memory and ports
    probes.py    processes that import torch and the trainer; if one fails, that is a finding

Tests: tests/unit/cli/doctor.
"""
