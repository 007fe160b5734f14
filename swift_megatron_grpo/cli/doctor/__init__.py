"""`swift-megatron-grpo doctor`: check packages and machine before a run, or for a bug report.

command.py   GPUs, driver, NCCL, disk, shared memory and ports, and whether torch and the trainer can be imported
packages.py  installed versions against the tested ranges, from this package's metadata
"""
