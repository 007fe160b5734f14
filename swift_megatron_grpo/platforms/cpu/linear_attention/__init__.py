"""flash-linear-attention's functions and vLLM's gated delta net in plain PyTorch, for models with linear attention.

fla.py            gated delta rule, l2 norm and causal convolution, as megatron-core and mcore-bridge import them
vllm_core.py      the core of vLLM's gated delta net, with its caches of states
"""
