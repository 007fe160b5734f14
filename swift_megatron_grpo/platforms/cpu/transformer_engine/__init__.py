"""Transformer Engine's API in plain PyTorch: the part of 2.11 that megatron-core 0.16.1 and mcore-bridge 1.6.5 use.

For `activate()`, which calls tree.install() to put it into sys.modules under Transformer Engine's own names. Strict:
what is not implemented raises by name, and no argument is ignored unless it can have no effect on the numbers.
"""
