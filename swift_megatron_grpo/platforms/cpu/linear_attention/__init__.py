"""flash-linear-attention's functions and vLLM's gated delta net in plain PyTorch, for models with linear attention.

    delta_rule.py     the gated delta rule, one sequence after the other, in chunks of tokens; the l2 norm
    convolution.py    the causal convolution over packed sequences
    tree.py           fla's module tree, as far as megatron-core and mcore-bridge import it
    vllm_core.py      the core of vLLM's gated delta net, with its caches of states

Tests: tests/unit/platforms/cpu/linear_attention.
"""
