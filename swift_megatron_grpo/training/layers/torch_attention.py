"""Attention by torch's own flash kernel, for `--attention_backend flash` without the package flash-attn.

Transformer Engine has no flash attention without that package, which is compiled for hours where no wheel fits. torch
contains the second version of the same kernel. On Hopper cuDNN's kernel (`--attention_backend fused`) is faster with up
to 128 channels per head, and its gradients are wrong with 256.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from mcore_bridge import ModelConfig
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType

from swift_megatron_grpo.platforms.attention_packages import has_flash_attention

MOST_CHANNELS = 256
_OTHER_KERNELS = "install flash-attn, or use --attention_backend fused"
_PLAIN_KERNEL = "use --attention_backend unfused"


def attend_with_torch(models: Iterable[torch.nn.Module]) -> None:
    """Use torch's kernel on GPUs where Transformer Engine has none; raise ValueError if it lacks what a layer needs."""
    for model in models:
        if not next(model.parameters()).is_cuda or has_flash_attention():
            continue
        for layer in model.modules():
            if isinstance(layer, Attention) and would_find_no_kernel(layer):
                replace_kernel(layer)


def would_find_no_kernel(layer: Attention) -> bool:
    """Return True if Transformer Engine without flash-attn would raise in this layer."""
    of_transformer_engine = isinstance(layer.core_attention, TEDotProductAttention)
    return of_transformer_engine and layer.config.attention_backend is AttnBackend.flash


def replace_kernel(layer: Any) -> None:
    """Make a layer attend with torch's kernel, or raise ValueError."""
    channels = layer.key_hidden_size
    config = layer.config
    is_causal = layer.attention_type == "self" and layer.attn_mask_type is AttnMaskType.causal
    masks = None if is_causal else f"masks other than the causal one; {_OTHER_KERNELS}"
    if missing := masks or what_is_missing(config, channels):
        raise ValueError(
            f"--attention_backend flash: flash-attn is not installed, and torch's own flash kernel has no {missing}"
        )
    scale = channels**-0.5 if config.softmax_scale is None else config.softmax_scale
    layer.core_attention.forward = partial(attend, scale)


def what_is_missing(config: ModelConfig, channels: int) -> str | None:
    """Return what torch's kernel lacks for such layers, and what to use instead; None: it computes them."""
    if config.params_dtype not in (torch.bfloat16, torch.float16):
        return f"{config.params_dtype} arithmetic; {_PLAIN_KERNEL}"
    if channels > MOST_CHANNELS:
        return f"heads with {channels} channels, {MOST_CHANNELS} are the most; {_PLAIN_KERNEL}"
    if config.context_parallel_size > 1:
        return f"ring attention for --context_parallel_size {config.context_parallel_size}; {_OTHER_KERNELS}"
    if config.multi_latent_attention:
        return f"multi-latent attention; {_OTHER_KERNELS}"
    if config.attention_dropout:
        return f"dropout (--attention_dropout {config.attention_dropout}); {_OTHER_KERNELS}"
    if config.window_size is not None:
        return f"windows ({config.window_size} tokens); {_OTHER_KERNELS}"
    if config.softmax_type != "vanilla":
        return f"attention sinks (softmax_type {config.softmax_type}); {_OTHER_KERNELS}"
    return None


def attend(
    scale: float,
    query: torch.Tensor,  # [n, heads, d]
    key: torch.Tensor,  # [m, groups, d]
    value: torch.Tensor,  # [m, groups, d]
    attention_mask: Any,
    attn_mask_type: Any,
    *,
    packed_seq_params: Any,
    **_: Any,
) -> torch.Tensor:
    """Return causal attention within each sequence of a pack, [n, heads * d].

    With fewer queries than keys, the last query sees the last key: the mask of completions that share a prompt.
    Values are a view of the projection of queries, keys and values, and backward would keep all of that.
    """
    output: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value.contiguous(),
        packed_seq_params.cu_seqlens_q,
        packed_seq_params.cu_seqlens_kv,
        int(packed_seq_params.max_seqlen_q),
        int(packed_seq_params.max_seqlen_kv),
        0.0,  # dropout
        True,  # causal
        False,  # return_debug_mask
        scale=scale,
    )[0]
    return output.flatten(1)
