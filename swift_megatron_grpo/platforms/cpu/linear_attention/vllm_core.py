"""The core of vLLM's gated delta net: convolution, delta rule, and the states of requests that continue.

vLLM 0.32 computes it on a CPU in bf16 only, with kernels that need AVX-512 BF16. This runs in every type, in fp32
inside, with the same caches, so that a training run in fp32 can be compared with its engine.

d: channels of queries, keys and values; w: width of the convolution; h: heads of values; k, v: sizes of a head.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
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
        if metadata.num_actual_tokens > 0:
            _run_requests(layer, metadata, mixed_qkv, b, a, core_attn_out, gdn_attention.is_conv_state_dim_first())

    # torch derives the operator's schema from the annotations, which must be types and not strings.
    core.__signature__ = inspect.signature(upstream, eval_str=True)  # type: ignore[attr-defined]
    gdn_attention.cpu_gdn_attention_core = core


@dataclass(frozen=True)
class _Request:
    """A request of a batch: its tokens, and where its states are."""

    tokens: torch.Tensor  # their rows in the batch
    slots: list[int]  # of the state after each token, the last one repeated
    state: int | None  # the slot of the state before the first token; None: a text begins
    accepted: int  # how many tokens of its last step were; those behind them are forgotten


def _requests_of(metadata: Any) -> Iterator[_Request]:
    if metadata.spec_sequence_masks is None:
        rows = torch.arange(metadata.num_actual_tokens)
    else:
        rows = metadata.non_spec_token_indx
        ends, accepted = metadata.spec_query_start_loc.tolist(), metadata.num_accepted_tokens.tolist()
        slots = metadata.spec_state_indices_tensor.tolist()
        for place in range(metadata.num_spec_decodes):
            tokens = metadata.spec_token_indx[ends[place] : ends[place + 1]]
            yield _Request(tokens, slots[place], slots[place][accepted[place] - 1], accepted[place])
    if metadata.non_spec_query_start_loc is None:
        return
    goes_on = [True] * metadata.num_decodes
    if metadata.num_prefills:
        goes_on += metadata.has_initial_state[metadata.num_decodes :].tolist()
    bounds = metadata.non_spec_query_start_loc.tolist()
    used_slots = metadata.non_spec_state_indices_tensor.tolist()
    for slot, begin, end, continued in zip(used_slots, bounds[:-1], bounds[1:], goes_on, strict=False):
        yield _Request(rows[begin:end], [slot], slot if continued else None, 1)


def _run_requests(
    layer: Any,
    metadata: Any,
    mixed_qkv: torch.Tensor,  # [tokens, d]
    b: torch.Tensor,  # [tokens, h]
    a: torch.Tensor,  # [tokens, h]
    out: torch.Tensor,  # [tokens, h, v]
    channels_first: bool,
) -> None:
    conv_cache, state_cache = layer.kv_cache[0], layer.kv_cache[1]  # [slots, w - 1 + drafts, d], [slots, h, v, k]
    if not channels_first:
        conv_cache = conv_cache.transpose(1, 2)  # [slots, d, w - 1 + drafts]
    slots, heads, v_size, k_size = state_cache.shape
    state_cache = state_cache.view(slots, heads, k_size, v_size)  # vLLM's CPU kernels use the memory in this order
    decay = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias.float())
    beta = b.float().sigmoid()
    before = layer.conv1d.weight.shape[-1] - 1  # tokens that the convolution of one reads in addition
    for request in _requests_of(metadata):
        tokens = request.tokens
        if not len(tokens):
            continue
        window = conv_cache[request.slots[0]]
        past = torch.zeros_like(window[:, :before]) if request.state is None else window[:, request.accepted - 1 :]
        channels = torch.cat([past[:, :before].float(), mixed_qkv[tokens].float().T], dim=1)  # [d, w - 1 + t]
        kept = channels[:, 1:] if len(request.slots) > 1 else channels[:, -before:]
        window[:, : kept.shape[1]] = kept.to(window.dtype)
        convolved = F.conv1d(channels[None], layer.conv1d.weight.float(), groups=len(channels))[0]
        activated = F.silu(convolved).T.to(mixed_qkv.dtype)  # [t, d]
        q, k, v = (x.transpose(1, 2).float() for x in layer.rearrange_mixed_qkv(activated))  # [1, heads, t, size]
        copies = heads // k.shape[1]
        q, k = (l2norm(x).repeat_interleave(copies, dim=1) for x in (q, k))
        state = None if request.state is None else state_cache[request.state][None].float()
        length = 1 if len(request.slots) > 1 else len(tokens)  # a draft may be wrong, so the state before it is kept
        for begin in range(0, len(tokens), length):
            of = slice(begin, begin + length)
            rows = tokens[of]
            output, state = delta_rule(
                q[:, :, of] * k_size**-0.5, k[:, :, of], v[:, :, of], decay[rows].T[None], beta[rows].T[None], state
            )
            state_cache[request.slots[begin // length]] = state[0].to(state_cache.dtype)
            out[rows] = output[0].transpose(0, 1).to(out.dtype)
