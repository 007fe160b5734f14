"""The core of vLLM's gated delta net: convolution, delta rule, and the states of requests that continue.

vLLM 0.32 computes it on a CPU in bf16 only, with kernels that need AVX-512 BF16. This runs in every type, in fp32
inside, with the same caches, so that a training run in fp32 can be compared with its engine.

d: channels of queries, keys and values; w: width of the convolution; h: heads of values; k, v: sizes of a head.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F

from swift_megatron_grpo.platforms.cpu.linear_attention.fla import delta_rule, l2norm


def compute_in_torch(gdn_attention: Any) -> None:
    """Replace the core in vllm...ops.cpu.gdn_attention, before vLLM registers it as an operator of torch."""
    upstream = gdn_attention.cpu_gdn_attention_core

    def core(
        mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: Any
    ) -> None:
        context = gdn_attention.get_forward_context()
        layer = context.no_compile_layers[gdn_attention._resolve_layer_name(layer_name)]
        if context.attn_metadata is None:  # vLLM measures memory
            return
        metadata = context.attn_metadata[layer.prefix]
        if metadata.spec_sequence_masks is not None:
            raise NotImplementedError("the CPU platform has no speculative decoding for gated delta nets")
        if metadata.num_actual_tokens > 0:
            _run_requests(layer, metadata, mixed_qkv, b, a, core_attn_out, gdn_attention.is_conv_state_dim_first())

    # torch derives the operator's schema from the annotations, which must be types and not strings.
    core.__signature__ = inspect.signature(upstream, eval_str=True)  # type: ignore[attr-defined]
    gdn_attention.cpu_gdn_attention_core = core


def _run_requests(
    layer: Any,
    metadata: Any,
    mixed_qkv: torch.Tensor,  # [tokens, d]
    b: torch.Tensor,  # [tokens, h]
    a: torch.Tensor,  # [tokens, h]
    out: torch.Tensor,  # [tokens, h, v]
    channels_first: bool,
) -> None:
    """Run every request of the batch: those that decode come first, then those whose prompt is read."""
    conv_cache, state_cache = layer.kv_cache[0], layer.kv_cache[1]  # [slots, w - 1, d] and [slots, h, v, k]
    if not channels_first:
        conv_cache = conv_cache.transpose(1, 2)  # [slots, d, w - 1]
    slots, heads, v_size, k_size = state_cache.shape
    state_cache = state_cache.view(slots, heads, k_size, v_size)  # vLLM's CPU kernels use the memory in this order
    decay = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias.float())
    beta = b.float().sigmoid()
    goes_on = [True] * metadata.num_decodes
    if metadata.num_prefills:
        goes_on += metadata.has_initial_state[metadata.num_decodes :].tolist()
    bounds = metadata.non_spec_query_start_loc.tolist()
    used_slots = metadata.non_spec_state_indices_tensor.tolist()
    for slot, begin, end, continued in zip(used_slots, bounds[:-1], bounds[1:], goes_on, strict=False):
        if begin == end:
            continue
        past = conv_cache[slot].float() if continued else torch.zeros(conv_cache.shape[1:])
        channels = torch.cat([past, mixed_qkv[begin:end].float().T], dim=1)  # [d, w - 1 + t]
        conv_cache[slot] = channels[:, -past.shape[1] :].to(conv_cache.dtype)
        convolved = F.conv1d(channels[None], layer.conv1d.weight.float(), groups=len(channels))[0]
        activated = F.silu(convolved).T.to(mixed_qkv.dtype)  # [t, d]
        q, k, v = (x.transpose(1, 2).float() for x in layer.rearrange_mixed_qkv(activated))  # [1, heads, t, size]
        copies = heads // k.shape[1]
        q, k = (l2norm(x).repeat_interleave(copies, dim=1) for x in (q, k))
        output, state = delta_rule(
            q * k_size**-0.5, k, v, decay[begin:end].T[None], beta[begin:end].T[None],
            state_cache[slot][None].float() if continued else None,
        )  # fmt: skip
        state_cache[slot] = state[0].to(state_cache.dtype)
        out[begin:end] = output[0].transpose(0, 1).to(out.dtype)
