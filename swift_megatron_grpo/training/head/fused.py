"""Rows of hidden states and the output weight -> log-probabilities and entropies, at little more than the price of the
matrix products.

The logits of a chunk of rows live in one buffer: product, a read for the statistics of the rows, and in backward
product, overwritten by their gradient, two products. Only statistics ([k]) outlive a chunk; but the last chunk of
forward is the first of backward, and is not computed again. A weight that is not trained and no entropy: the gradient
of each log-prob is known in forward up to a factor, so backward only multiplies.

k: rows; h: hidden size; v: vocabulary of this tensor-parallel rank; c: rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from swift_megatron_grpo.training.head.matmuls import d_rows_of, logits_into
from swift_megatron_grpo.training.head.row_statistics import RowStats, Vocabulary
from swift_megatron_grpo.training.head.softmax import combine, over_ranks, stats_of_rows, sums_of_rows, to_gradient_
from swift_megatron_grpo.training.head.weight_gradient import WeightGradient


@dataclass(frozen=True, slots=True)
class Head:
    vocabulary: Vocabulary
    entropy: bool
    chunk: int  # rows whose logits exist at one time


def fused_log_probs(rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: Head) -> torch.Tensor:
    """[k, h], [v, h], [k] -> [k, 1 or 2] fp32."""
    if not torch.is_grad_enabled() or not (rows.requires_grad or weight.requires_grad):
        return _stats(rows, weight, targets, head, _buffer(rows, weight, head)).columns()
    if weight.requires_grad or head.entropy:
        # With entropy a frozen weight would take as many products without recomputing, and more memory.
        values: torch.Tensor = _Recomputing.apply(rows, weight, targets, head)
    else:
        values = _KnownInForward.apply(rows, weight, targets, head)
    return values


class _Recomputing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: Head) -> torch.Tensor:
        ctx.buffer = _buffer(rows, weight, head)
        stats = _stats(rows, weight, targets, head, ctx.buffer)
        ctx.save_for_backward(rows, targets, stats.logprob, stats.peak, stats.log_total, stats.entropy)
        ctx.weight, ctx.head = weight, head  # the parameter itself: main_grad is an attribute of it
        return stats.columns()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        rows, targets, *saved = ctx.saved_tensors
        d_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        d_weight = WeightGradient(ctx.weight) if ctx.needs_input_grad[1] else None
        kept, ctx.buffer = ctx.buffer, None  # None in a second backward through a retained graph
        _gradients(rows, ctx.weight, targets, ctx.head, RowStats(*saved), grad, kept, d_rows, d_weight)
        del kept  # before there is one more tensor of the weight's size
        return d_rows, None if d_weight is None else d_weight.for_autograd(), None, None


class _KnownInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: Head) -> torch.Tensor:
        logprobs = torch.empty(len(rows), 1, dtype=torch.float32, device=rows.device)
        slopes = torch.empty_like(rows)  # d logprob / d row
        buffer = _buffer(rows, weight, head)
        for part in _parts(rows, head):
            logits = logits_into(buffer[: part.stop - part.start], rows[part], weight)
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


def _parts(rows: torch.Tensor, head: Head) -> list[slice]:
    return [slice(begin, min(begin + head.chunk, len(rows))) for begin in range(0, len(rows), head.chunk)]


def _buffer(rows: torch.Tensor, weight: torch.Tensor, head: Head) -> torch.Tensor:
    """[c, v] for the logits of one chunk after the other"""
    return torch.empty(min(head.chunk, len(rows)), len(weight), dtype=rows.dtype, device=rows.device)


def _stats(
    rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: Head, buffer: torch.Tensor
) -> RowStats:
    """Of all rows; tensor-parallel ranks meet once. Leaves the logits of the last chunk in the buffer."""
    sums = torch.empty(4 if head.entropy else 3, len(rows), dtype=torch.float32, device=rows.device)
    for part in _parts(rows, head):
        logits = logits_into(buffer[: part.stop - part.start], rows[part], weight)
        sums[:, part] = sums_of_rows(logits, targets[part], head.vocabulary, head.entropy)
    return combine(over_ranks(sums, head.vocabulary.group), head.vocabulary.temperature)


def _gradients(
    rows: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    head: Head,
    stats: RowStats,
    upstream: torch.Tensor,  # [k, 1 or 2]
    kept: torch.Tensor | None,  # the buffer as forward left it
    d_rows: torch.Tensor | None,  # out
    d_weight: WeightGradient | None,  # out
) -> None:
    buffer = _buffer(rows, weight, head) if kept is None else kept
    computed = kept is not None
    for part in reversed(_parts(rows, head)):
        logits = buffer[: part.stop - part.start]
        if not computed:
            logits_into(logits, rows[part], weight)
        computed = False
        d_logits = to_gradient_(logits, targets[part], stats.of(part), upstream[part], head.vocabulary)
        if d_rows is not None:
            d_rows[part] = d_rows_of(d_logits, weight)
        if d_weight is not None:
            d_weight.add(d_logits, rows[part])
