"""DotProductAttention: sbhd and packed thd batches, with and without context parallelism.

Used by megatron-core's TEDotProductAttention. Packed sequences are processed one by one, so that time and memory grow
with the sequences and not with the square of the pack, and a sequence's result is bit-identical for any
neighbours. Context parallelism gathers keys and values: rank r of n has chunks r and 2n-1-r of 2n of every sequence,
which is Transformer Engine's layout for all of its communication types.

These arguments have no effect on the numbers and are accepted: max_seqlen_q and max_seqlen_kv, fast_zero_fill,
pad_between_seqs (it follows from the padded cu_seqlens), num_splits, layer_number, attention_type, cp_stream,
cp_global_ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from swift_megatron_grpo.platforms.cpu.stand_in import reject_unsupported
from swift_megatron_grpo.platforms.cpu.transformer_engine import base
from swift_megatron_grpo.platforms.cpu.transformer_engine.attention_core import Rules, attend, attend_at, visible

_MASK_TYPES = (
    "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right", "arbitrary",
)  # fmt: skip


class DotProductAttention(base.TransformerEngineBaseModule):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: dist.ProcessGroup | None = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: dist.ProcessGroup | None = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
    ) -> None:
        super().__init__()
        reject_unsupported("DotProductAttention", return_max_logit=return_max_logit)
        self._set_tensor_parallelism(tp_group, tp_size)
        self.attn_mask_type, self.window_size, self.qkv_format = attn_mask_type, window_size, qkv_format
        self.attention_dropout = attention_dropout
        # Under sequence parallelism the generators of the ranks already differ where required.
        self.get_rng_state_tracker = None if sequence_parallel else get_rng_state_tracker
        key_channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = key_channels**-0.5 if softmax_scale is None else softmax_scale
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

        self.softmax_type = softmax_type
        heads = num_attention_heads // self.tp_size
        if softmax_type == "learnable":
            self._new_parameter("softmax_offset", (heads,), base.default_weight_init, tracked=True, dtype=torch.float32)
            self.reset_parameters()
        elif softmax_type in ("vanilla", "off-by-one"):
            self.softmax_offset = torch.zeros(heads) if softmax_type == "off-by-one" else None
        else:
            raise ValueError(f"DotProductAttention(softmax_type={softmax_type!r})")

    def set_context_parallel_group(
        self,
        cp_group: dist.ProcessGroup | None,
        cp_global_ranks: list[int] | None,
        cp_stream: Any,
        cp_comm_type: str = "p2p",
    ) -> None:
        reject_unsupported("DotProductAttention", hierarchical_cp_group=isinstance(cp_group, list))
        self.cp_group = cp_group if cp_group is not None and cp_group.size() > 1 else None
        self.cp_comm_type = cp_comm_type

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool = False,
        num_splits: int | None = 1,
    ) -> torch.Tensor:
        """Compute attention of a batch in one of two formats.

        thd: [t, h, d], [t, g, d], [t, g, e] -> [t, h * e]; sbhd: [s, b, h, d], ... -> [s, b, h * e].
        Under context parallelism s and t count this rank's tokens, and cu_seqlens those of all ranks.
        """
        owner = "DotProductAttention.forward"
        reject_unsupported(
            owner,
            checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=None if core_attention_bias_type == "no_bias" else core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            inference_params=inference_params is not None,
            fp8_output=fp8_output,
        )
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if mask_type not in _MASK_TYPES:
            raise ValueError(f"{owner}(attn_mask_type={mask_type!r})")
        qkv_format = self.qkv_format if qkv_format is None else qkv_format
        left, right = window_size or self.window_size or (-1, -1)
        causal = "causal" in mask_type
        rules = Rules(
            causal,
            bottom_right="bottom_right" in mask_type,
            window=(left, -1 if causal else right),  # a causal mask already hides the keys to the right
            scale=self.softmax_scale,
            softmax_offset=self.softmax_offset,
            dropout=self.attention_dropout if self.training else 0.0,
        )
        query, key, value = (tensor.float() for tensor in (query_layer, key_layer, value_layer))
        with self._fork_rng() if rules.dropout else nullcontext():
            if qkv_format == "thd":
                if "padding" not in mask_type:
                    raise ValueError(f"{owner}: thd needs a padding mask, not {mask_type}")
                queries = read_packing(cu_seqlens_q, cu_seqlens_q_padded)
                keys = read_packing(cu_seqlens_kv, cu_seqlens_kv_padded)
                output = self._attend_packed(query, key, value, queries, keys, rules)
            else:
                reject_unsupported(owner, qkv_format=None if qkv_format == "sbhd" else qkv_format)
                reject_unsupported(owner, cu_seqlens_of_a_batch=cu_seqlens_q is not None or cu_seqlens_kv is not None)
                output = self._attend_batch(query, key, value, _allowed(mask_type, attention_mask), rules)
        return output.flatten(-2).to(query_layer.dtype)

    def _attend_packed(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        queries: list[PackedSequence],
        keys: list[PackedSequence],
        rules: Rules,
    ) -> torch.Tensor:
        """Attend within packed sequences: [t, h, d], [t, g, d], [t, g, e] -> [t, h, e]; padding gets zeros."""
        key, value = (gather_sequences(tensor, keys, self.cp_group) for tensor in (key, value))
        empty = query.new_zeros(1, query.shape[1], value.shape[2])  # the output of padding
        outputs, rows = [], 0
        for own, other in zip(queries, keys, strict=True):
            end = other.start + other.length
            own_key, own_value = (_heads_first(tensor[other.start : end]) for tensor in (key, value))
            for chunk in chunks_of(own, self.cp_group):
                tokens = min(max(own.length - chunk.position, 0), chunk.count)
                own_query = _heads_first(query[chunk.row : chunk.row + tokens])
                output = attend_at(own_query, own_key, own_value, rules, chunk.position, own.length)
                outputs += [output[0].transpose(0, 1), empty.expand(chunk.count - tokens, -1, -1)]
                rows += chunk.count
        outputs.append(empty.expand(query.shape[0] - rows, -1, -1))
        return torch.cat(outputs)

    def _attend_batch(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor | None, rules: Rules
    ) -> torch.Tensor:
        """Attend within a batch without padding: [s, b, h, d], [s, b, g, d], [s, b, g, e] -> [s, b, h, e]."""
        group, ranks = self.cp_group, 1 if self.cp_group is None else self.cp_group.size()
        own, seen = (PackedSequence(0, tensor.shape[0] * ranks, tensor.shape[0] * ranks) for tensor in (query, key))
        key, value = (gather_sequences(tensor, [seen], group).permute(1, 2, 0, 3) for tensor in (key, value))
        if allowed is not None:
            reject_unsupported("DotProductAttention.forward", mask_with_context_parallelism=group is not None)
            full = visible(own.length, seen.length, 0, own.length, rules)
            allowed = allowed if full is None else allowed & full
            return attend(query.permute(1, 2, 0, 3), key, value, rules, allowed).permute(2, 0, 1, 3)
        outputs = []
        for chunk in chunks_of(own, group):
            own_query = query[chunk.row : chunk.row + chunk.count].permute(1, 2, 0, 3)
            outputs.append(attend_at(own_query, key, value, rules, chunk.position, own.length).permute(2, 0, 1, 3))
        return torch.cat(outputs)


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """Transpose [t, h, d] -> [1, h, t, d]."""
    return tensor.transpose(0, 1)[None]


def _allowed(mask_type: str, mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor | None:
    """Invert a mask, in which True means hidden; types other than padding and arbitrary ignore it.

    This follows Transformer Engine.
    padding: [b, 1, 1, s], one for both queries and keys, or one for each; arbitrary: broadcastable to [b, h, q, k].
    """
    if mask_type == "arbitrary":
        if not isinstance(mask, torch.Tensor):
            raise ValueError("DotProductAttention.forward: an arbitrary mask must be one tensor")
        return ~mask.bool()
    if "padding" not in mask_type:
        return None
    if mask is None:
        raise ValueError(f"DotProductAttention.forward: {mask_type} needs attention_mask or packed sequences")
    query_mask, key_mask = mask if isinstance(mask, tuple) else (mask, mask)
    for padding in (query_mask, key_mask):
        if padding.dim() != 4 or padding.shape[1:3] != (1, 1):
            raise ValueError(
                f"DotProductAttention.forward: a padding mask must be [b, 1, 1, s], not {list(padding.shape)}"
            )
    return ~(query_mask.bool().transpose(2, 3) | key_mask.bool())


# ---- positions of tokens: packed sequences, and their chunks on context-parallel ranks


@dataclass(frozen=True, slots=True)
class PackedSequence:
    start: int  # its first token among the tokens of all context-parallel ranks
    length: int  # tokens without padding
    room: int  # tokens including padding, up to the next sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence on this rank."""

    row: int  # its first token among this rank's tokens
    position: int  # its first token within the sequence
    count: int


def read_packing(cu_seqlens: torch.Tensor | None, cu_seqlens_padded: torch.Tensor | None) -> list[PackedSequence]:
    """Return the sequences: cu_seqlens [n + 1] counts tokens without padding, cu_seqlens_padded includes it."""
    if cu_seqlens is None:
        raise ValueError("DotProductAttention.forward: thd needs cu_seqlens_q and cu_seqlens_kv")
    lengths = [end - begin for begin, end in pairwise(cu_seqlens.tolist())]
    starts = (cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded).tolist()
    if starts[0] != 0:
        raise ValueError(f"DotProductAttention.forward: the first sequence begins at {starts[0]}, not at 0")
    return [
        PackedSequence(begin, length, end - begin)
        for (begin, end), length in zip(pairwise(starts), lengths, strict=True)
    ]


def chunks_of(sequence: PackedSequence, group: dist.ProcessGroup | None) -> list[Chunk]:
    """Return this rank's chunks of a sequence, in the order of its tokens."""
    if group is None:
        return [Chunk(sequence.start, 0, sequence.room)]
    ranks, rank, size = group.size(), group.rank(), _chunk_size(sequence, group.size())
    row = sequence.start // ranks
    return [Chunk(row, rank * size, size), Chunk(row + size, (2 * ranks - 1 - rank) * size, size)]


def gather_sequences(
    tensor: torch.Tensor, sequences: list[PackedSequence], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Gather [this rank's tokens, ...] -> [all tokens, ...], in the order of the sequences."""
    if group is None:
        return tensor
    ranks, tokens = group.size(), tensor.shape[0]
    indices = []  # into [rank 0's tokens, rank 1's tokens, ...]
    for sequence in sequences:
        size = _chunk_size(sequence, ranks)
        first = torch.arange(size) + sequence.start // ranks
        indices += [first + rank * tokens for rank in range(ranks)]
        indices += [first + size + rank * tokens for rank in reversed(range(ranks))]
    gathered: torch.Tensor = base.mappings().gather_from_sequence_parallel_region(tensor, group=group)
    return gathered.index_select(0, torch.cat(indices))


def _chunk_size(sequence: PackedSequence, ranks: int) -> int:
    if sequence.room % (2 * ranks):
        raise ValueError(
            f"context parallelism over {ranks} ranks: a sequence of {sequence.room} tokens is not divisible by "
            f"{2 * ranks}"
        )
    return sequence.room // (2 * ranks)
