"""The optimizer step with few kernels and little memory.

flat_optimizer.py  update and copy a few large tensors instead of thousands of small ones
adam_portions.py   bound the memory that Adam needs for moments in bf16
"""
