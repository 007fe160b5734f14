"""A check of packages and machine, before a run or for a report: `swift-megatron-grpo doctor`.

    command.py   the command
    packages.py  installed versions against the tested ranges, which are those of this package's metadata
    machine.py   GPUs, driver, NCCL, disk, shared memory and ports
    probes.py    processes that import torch and the trainer, whose failure is a finding and not a crash

Tests: tests/unit/cli/doctor.
"""
