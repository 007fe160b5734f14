"""Transformer Engine's API in plain PyTorch: the part of 2.11 that megatron-core 0.16.1 and mcore-bridge 1.6.5 use.

`activate()` calls tree.install(), which puts these modules into sys.modules under Transformer Engine's own names. What
is not implemented raises an error with its name, and an argument is ignored only if it cannot affect the numbers.

tree.py              builds the module tree and installs it
base.py              base class of the layers: deferred initialisation, fp8 attributes; the tracker of random states
layers.py            Linear, LayerNormLinear, GroupedLinear and their tensor parallelism; RMSNorm, LayerNorm
attention.py         DotProductAttention: batch formats, masks, packed sequences, context-parallel chunks
attention_core.py    attention of one block of queries
optimizers.py        FusedAdam, FusedSGD, multi-tensor functions
permutation.py       tokens sorted by expert and back (--moe_permute_fusion)

Tests: tests/unit/platforms/cpu.
"""
