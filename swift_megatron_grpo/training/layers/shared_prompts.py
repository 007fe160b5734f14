"""Attention in micro batches where several completions follow one copy of their prompt.

A completion is c queries over p + c keys, with a causal mask that ends with the last of both; the prompt is p queries
over p keys. One call of the kernel computes all of them, over keys and values that are gathered for it. Backward of the
gather adds up the gradients of the prompt's keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from mcore_bridge import ModelConfig
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnBackend
from torch import nn

from swift_megatron_grpo.packing.collate import ModelInputs
from swift_megatron_grpo.training.vision_tower import language_model

_BOTTOM_RIGHT = SimpleNamespace(name="padding_causal_bottom_right")  # Megatron's enumeration has no such mask


@dataclass
class SharedPrompts(PackedSeqParams):
    """Parameters of a micro batch with shared prompts: as one sequence, and for attention as segments.

    Megatron passes them to every layer, also when backward recomputes it. Rotary embeddings are computed as for one
    sequence, whose angles are already in the order of its tokens.
    """

    segments: PackedSeqParams | None = None
    key_places: torch.Tensor | None = None  # [cu_seqlens_kv[-1] of the segments]


def packed_params(inputs: ModelInputs) -> PackedSeqParams:
    """Return Megatron's parameters of a micro batch."""
    shared = inputs.shared
    segments = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=inputs.cu_seqlens,
        cu_seqlens_kv=inputs.cu_seqlens if shared is None else shared.cu_seqlens,
        max_seqlen_q=inputs.max_seqlen,
        max_seqlen_kv=inputs.max_seqlen if shared is None else shared.max_seqlen,
    )
    if shared is None:
        return segments
    # First and last, as a slice: an index would be copied from the host, which then waits for the device.
    whole = inputs.cu_seqlens[:: len(inputs.cu_seqlens) - 1].contiguous()
    # The table of angles has as many rows as the longest sequence has positions.
    return SharedPrompts(
        qkv_format="thd", cu_seqlens_q=whole, cu_seqlens_kv=whole, max_seqlen_q=shared.max_seqlen,
        max_seqlen_kv=shared.max_seqlen, segments=segments, key_places=shared.places,
    )  # fmt: skip


def share_prompts(models: Sequence[nn.Module], cp_size: int, share_from: float | None) -> str | None:
    """Prepare models to share prompts; return why they cannot.

    `share_from`: the share of the work that sharing must save; None: prompts are repeated. 0 is a request of the user,
    which it is an error to refuse.
    """
    if share_from is None:
        return None
    on_request = share_from == 0
    reason = why_repeated(models[0].config, cp_size, on_request)
    if reason is None:
        attend_to_shared_prompts(models)
    elif on_request:
        raise ValueError(f"--share_prompts true: {reason}; use --share_prompts auto, which repeats prompts here")
    return reason


def why_repeated(config: ModelConfig, cp_size: int, on_request: bool) -> str | None:
    """Return why this model and layout need a copy of the prompt for each completion; None: they share it.

    `on_request`: the user asks for it, and accepts that losses of routers count a shared token once.
    """
    if cp_size > 1:
        return f"--context_parallel_size {cp_size}: ring attention cuts queries and keys alike"
    if config.attention_backend is AttnBackend.unfused:
        return "--attention_backend unfused is not tested with queries that are fewer than keys"
    if config.experimental_attention_variant is not None:
        return f"layers with {config.experimental_attention_variant} have a state that runs along each sequence"
    if config.multi_latent_attention:
        return "multi-latent attention takes positions from the bounds of sequences"
    if config.window_size is not None:
        return f"layers attend to a window of {config.window_size} tokens"
    if config.engram_enabled:
        return "n-grams of tokens run along each sequence"
    if config.num_moe_experts is not None and not on_request:
        for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"):
            if _counts_tokens(config, name):
                return f"--{name} {getattr(config, name)} would count the tokens of a prompt once"
    return None


def _counts_tokens(config: ModelConfig, name: str) -> bool:
    """Return True if this setting of routers has an effect, which depends on how many tokens each expert gets."""
    if name == "moe_router_bias_update_rate" and not config.moe_router_enable_expert_bias:
        return False
    value = getattr(config, name)
    return any(value) if isinstance(value, list) else bool(value)


def attend_to_shared_prompts(models: Sequence[nn.Module]) -> None:
    """Make the attention and the rotary embedding of `models`, unwrapped, ready for SharedPrompts."""
    for model in models:
        decoder: Any = language_model(model)
        for module in decoder.modules():
            if isinstance(module, TEDotProductAttention):
                module.forward = partial(_attend, module.forward)
        decoder._get_rotary_pos_emb = partial(_angles_of_tokens, decoder.config, decoder._get_rotary_pos_emb)


def _attend(
    forward: Any,
    query: torch.Tensor,  # [n, heads, d]
    key: torch.Tensor,  # [n, groups, d]
    value: torch.Tensor,
    attention_mask: Any,
    attn_mask_type: Any,
    **kwargs: Any,
) -> torch.Tensor:
    packed = kwargs.get("packed_seq_params")
    if isinstance(packed, SharedPrompts):
        places = packed.key_places
        assert places is not None
        key = key.index_select(0, places)
        value = value.index_select(0, places)
        attn_mask_type, kwargs["packed_seq_params"] = _BOTTOM_RIGHT, packed.segments
    output: torch.Tensor = forward(query, key, value, attention_mask, attn_mask_type, **kwargs)
    return output


def _angles_of_tokens(
    config: ModelConfig,
    get_rotary_pos_emb: Any,
    decoder_input: torch.Tensor,
    position_ids: torch.Tensor,
    packed_seq_params: PackedSeqParams,
    **kwargs: Any,
) -> tuple[Any, Any, Any]:
    """Return the angles of each token where a fused kernel would take those of its place in the micro batch."""
    table, cos, sin = get_rotary_pos_emb(decoder_input, position_ids, packed_seq_params=packed_seq_params, **kwargs)
    if isinstance(packed_seq_params, SharedPrompts) and config.apply_rope_fusion and position_ids.ndim == 2:
        table = table[position_ids[0]]
    return table, cos, sin
