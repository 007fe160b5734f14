"""Rows of hidden states and the output weight -> log-probabilities and entropies, at little more than the price of the
matrix products.

The logits of a chunk of rows live in one buffer: product, a read for the statistics of the rows, and in backward
product, overwritten by their gradient, two products. Only statistics ([k]) outlive a chunk. A weight that is not
trained and no entropy: the gradient of each log-prob is known in forward up to a factor, so backward only multiplies.

k: rows; h: hidden size; v: vocabulary of this tensor-parallel rank; c: rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from swift_megatron_grpo.training.main_grad import WeightGradient
from swift_megatron_grpo.training.products import d_rows_of, logits_into
from swift_megatron_grpo.training.softmax_rows import (
    RowStats,
    Vocabulary,
    combine,
    over_ranks,
    stats_of_rows,
    sums_of_rows,
    to_gradient_,
)


@dataclass(frozen=True, slots=True)
class Head:
    vocabulary: Vocabulary
    entropy: bool
    chunk: int  # rows whose logits exist at one time


def fused_log_probs(rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: Head) -> torch.Tensor:
    """[k, h], [v, h], [k] -> [k, 1 or 2] fp32."""
    if not torch.is_grad_enabled() or not (rows.requires_grad or weight.requires_grad):
        return _stats(rows, weight, targets, head).columns()
    if weight.requires_grad or head.entropy:
        # With entropy a frozen weight would take as many products without recomputing, and more memory.
        values: torch.Tensor = _Recomputing.apply(rows, weight, targets, head)
    else:
        values = _KnownInForward.apply(rows, weight, targets, head)
    return values


class _Recomputing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: Head) -> torch.Tensor:
        stats = _stats(rows, weight, targets, head)
        ctx.save_for_backward(rows, targets, stats.logprob, stats.peak, stats.log_total, stats.entropy)
        ctx.weight, ctx.head = weight, head  # the parameter itself: main_grad is an attribute of it
        return stats.columns()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        rows, targets, *saved = ctx.saved_tensors
        stats, weight, head = RowStats(*saved), ctx.weight, ctx.head
        d_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        d_weight = WeightGradient(weight) if ctx.needs_input_grad[1] else None
        for part, logits in _chunks_of_logits(rows, weight, head):
            d_logits = to_gradient_(logits, targets[part], stats.of(part), grad[part], head.vocabulary)
            if d_rows is not None:
                d_rows[part] = d_rows_of(d_logits, weight)
            if d_weight is not None:
                d_weight.add(d_logits, rows[part])
        return d_rows, None if d_weight is None else d_weight.for_autograd(), None, None


class _KnownInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: Head) -> torch.Tensor:
        logprobs = torch.empty(len(rows), 1, dtype=torch.float32, device=rows.device)
        slopes = torch.empty_like(rows)  # d logprob / d row
        for part, logits in _chunks_of_logits(rows, weight, head):
            # The gradient needs whole rows, so here tensor-parallel ranks meet once a chunk.
            stats = stats_of_rows(logits, targets[part], head.vocabulary, entropy=False)
            logprobs[part, 0] = stats.logprob
            one = torch.ones_like(stats.logprob)[:, None]
            slopes[part] = d_rows_of(to_gradient_(logits, targets[part], stats, one, head.vocabulary), weight)
        ctx.save_for_backward(slopes)
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        [slopes] = ctx.saved_tensors
        return (slopes * grad).to(slopes.dtype), None, None, None


def _stats(rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: Head) -> RowStats:
    """Of all rows; tensor-parallel ranks meet once."""
    sums = torch.empty(4 if head.entropy else 3, len(rows), dtype=torch.float32, device=rows.device)
    for part, logits in _chunks_of_logits(rows, weight, head):
        sums[:, part] = sums_of_rows(logits, targets[part], head.vocabulary, head.entropy)
    return combine(over_ranks(sums, head.vocabulary.group), head.vocabulary.temperature)


def _chunks_of_logits(rows: torch.Tensor, weight: torch.Tensor, head: Head) -> Iterator[tuple[slice, torch.Tensor]]:
    """Which rows, and their logits [c, v]: all in the same memory, and free to be overwritten."""
    buffer = torch.empty(min(head.chunk, len(rows)), len(weight), dtype=rows.dtype, device=rows.device)
    for begin in range(0, len(rows), head.chunk):
        part = slice(begin, min(begin + head.chunk, len(rows)))
        yield part, logits_into(buffer[: part.stop - part.start], rows[part], weight)
