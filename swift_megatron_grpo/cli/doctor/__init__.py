"""A check of packages and machine, before a run or for a report: `python -m swift_megatron_grpo.cli.doctor`.

    __main__.py  the command: collects, prints, and exits with 1 if a run would fail
    packages.py  installed versions against the tested ranges, which are those of this package's metadata
    machine.py   GPUs, driver, NCCL, disk, shared memory and ports
    probes.py    processes that import torch and the trainer, whose failure is a finding and not a crash
    finding.py   one line of the report

Tests: tests/unit/cli/doctor.
"""
