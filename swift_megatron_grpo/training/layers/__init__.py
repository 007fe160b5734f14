"""Layers with the same arithmetic in fewer or faster kernels, and their check.

fast_kernels.py     faster kernels of a layer (--fast_kernels)
adapter_layers.py   linear layers to which adapters add inside the matrix products
torch_attention.py  torch's flash kernel, where Transformer Engine has none
shared_prompts.py   attention of completions that share one copy of their prompt
attention_check.py  compare attention kernels with exact arithmetic before training (--check_attention)
"""
