"""Transformer Engine's API in plain PyTorch: the part of 2.11 that megatron-core 0.16.1 and mcore-bridge 1.6.5 use.

`activate()` calls tree.install(), which puts these modules into sys.modules under Transformer Engine's own names. What
is not implemented raises an error with its name, and an argument is ignored only if it cannot affect the numbers.

tree.py              builds the module tree and installs it
base.py              base class of the layers: deferred initialisation, fp8 attributes
linear.py            Linear, LayerNormLinear, GroupedLinear
parallel_linear.py   tensor parallelism of the linear layers
norm.py              RMSNorm, LayerNorm
attention.py         DotProductAttention: batch formats, masks, context parallelism
attention_core.py    attention of one block of queries
attention_layout.py  positions of packed sequences and context-parallel chunks
collectives.py       collectives with gradients
distributed.py       activation recompute and the tracker of random states
optimizers.py        FusedAdam, FusedSGD, multi-tensor functions
permutation.py       tokens sorted by expert and back (--moe_permute_fusion)
recipe.py            fp8 state, always off

Tests: tests/unit/platforms/cpu.
"""
