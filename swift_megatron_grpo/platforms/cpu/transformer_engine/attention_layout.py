"""Positions of tokens for DotProductAttention: packed sequences, and their chunks on context-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from swift_megatron_grpo.platforms.cpu.transformer_engine.collectives import GatherSequence


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """One sequence of a packed batch."""

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
    gathered: torch.Tensor = GatherSequence.apply(tensor, group)
    return gathered.index_select(0, torch.cat(indices))


def _chunk_size(sequence: PackedSequence, ranks: int) -> int:
    if sequence.room % (2 * ranks):
        raise ValueError(
            f"context parallelism over {ranks} ranks: a sequence of {sequence.room} tokens is not divisible by "
            f"{2 * ranks}"
        )
    return sequence.room // (2 * ranks)
