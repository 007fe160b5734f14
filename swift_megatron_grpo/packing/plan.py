"""Which rank trains which completion in which micro batch. Pure Python: every rank finds the same, nobody asks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step: assignment[dp rank][micro batch] = indices of samples."""

    assignment: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_micro_batches(self) -> int:
        return len(self.assignment[0])

    def of_rank(self, dp_rank: int) -> tuple[tuple[int, ...], ...]:
        return self.assignment[dp_rank]


def plan_by_count(num_samples: int, dp_size: int, micro_batch_size: int) -> StepPlan:
    """Consecutive samples, `micro_batch_size` to a micro batch, the same number of micro batches on every rank."""
    per_rank = dp_size * micro_batch_size
    if num_samples == 0 or num_samples % per_rank:
        raise ValueError(
            f"{num_samples} completions cannot be dealt to {dp_size} data-parallel ranks in micro batches of "
            f"{micro_batch_size}: the number must be a positive multiple of {per_rank}"
        )
    share = num_samples // dp_size
    return StepPlan(
        tuple(
            tuple(
                tuple(range(start, start + micro_batch_size))
                for start in range(rank * share, (rank + 1) * share, micro_batch_size)
            )
            for rank in range(dp_size)
        )
    )


@dataclass(frozen=True, slots=True)
class Alignment:
    """What the layout demands of lengths."""

    sequence: int  # every sequence is a multiple: context parallelism cuts it into 2 * CP pieces
    total: int  # the packed micro batch is a multiple: each CP share is cut again by sequence parallelism

    @classmethod
    def of_layout(cls, tp_size: int, cp_size: int, sequence_parallel: bool) -> Alignment:
        sequence = 2 * cp_size if cp_size > 1 else 1
        return cls(sequence, math.lcm(sequence, cp_size * (tp_size if sequence_parallel else 1)))


def padded_lengths(lengths: Sequence[int], align: Alignment) -> list[int]:
    """Lengths of the sequences of one micro batch after padding: the last one takes what the total still needs."""
    padded = [-(-length // align.sequence) * align.sequence for length in lengths]
    padded[-1] += -sum(padded) % align.total
    return padded


def zigzag_positions(lengths: Sequence[int], cp_rank: int, cp_size: int) -> list[int]:
    """Packed positions that a context-parallel rank holds, in its order.

    Of the 2 * CP equal pieces of a sequence, rank r holds pieces r and 2 * CP - 1 - r: with a causal mask every rank
    then has the same work.
    """
    if cp_size == 1:
        return list(range(sum(lengths)))
    positions: list[int] = []
    start = 0
    for length in lengths:
        piece = length // (2 * cp_size)
        for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
            positions.extend(range(start + index * piece, start + (index + 1) * piece))
        start += length
    return positions
