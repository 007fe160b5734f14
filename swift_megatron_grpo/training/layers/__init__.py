"""Layers with the same arithmetic in fewer or faster kernels, and their check.

fast_kernels.py     faster kernels of a layer (--fast_kernels)
adapter_layers.py   linear layers to which adapters add inside the matrix products
torch_attention.py  torch's flash kernel, where Transformer Engine has none
shared_prompts.py   attention of completions that share one copy of their prompt
sequence_bounds.py  bounds of packed sequences, which gated delta nets read on the host in every layer
attention_check.py  compare attention kernels with exact arithmetic before training (--check_attention)

Tests: tests/unit/training/layers, tests/dist.
"""
