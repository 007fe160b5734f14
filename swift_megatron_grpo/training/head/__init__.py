"""The log-prob head: hidden states to log-probs and entropies of completion tokens, in chunks of rows.

logprob.py          replaces the model's output layer inside a context
fused.py            the fast path, for logits that are a plain matrix product
softmax.py          the arithmetic: statistics of rows, and gradients of logits
softmax_triton.py   the same two functions as Triton kernels, for CUDA
row_statistics.py   data types of both
matmuls.py          the three matrix products, accumulated in fp32
"""
