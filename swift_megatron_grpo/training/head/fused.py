"""Computes log-probs and entropies from hidden states, at little more than the cost of the matrix products.

The logits of one chunk of rows at a time live in a buffer. Forward: one matrix product, and one read for the statistics
of the rows. Backward: the same product again, logits overwritten by their gradient, two more products. Only statistics
([k]) outlive a chunk, except that the last chunk of forward stays in the buffer and is the first of backward. With a
frozen weight and no entropy, forward computes the gradient of each log-prob up to a factor; backward only multiplies.

k: rows; h: hidden size; v: vocabulary of this tensor-parallel rank; c: rows of a chunk.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from swift_megatron_grpo.training.head.matmuls import WeightGradient, d_rows_of, logits_into
from swift_megatron_grpo.training.head.row_statistics import RowStats, Vocabulary
from swift_megatron_grpo.training.head.softmax import combine, over_ranks, stats_of_rows, sums_of_rows, to_gradient_

# 4,352 rows of 152k bf16 logits: matrix products of that size run at the GPU's full rate.
_CUDA_BYTES = 5 * 2**28
_CPU_BYTES = 2**28
_TILE = 128  # rows of the tiles into which a GPU cuts a matrix product


@dataclass(frozen=True, slots=True)
class Head:
    vocabulary: Vocabulary
    entropy: bool
    chunk: int  # rows whose logits exist at one time


def rows_per_chunk(rows: int, columns: int, dtype: torch.dtype, on_cuda: bool) -> int:
    """Return the number of rows whose logits exist at one time, at least 1.

    More rows mean larger matrix products and fewer passes over the weight and its gradient; fewer take less memory.
    Chunks have about equal sizes, so that the last one is not a product of a few rows.
    """
    tile, budget = (_TILE, _CUDA_BYTES) if on_cuda else (1, _CPU_BYTES)
    most = max(tile, budget // (columns * dtype.itemsize) // tile * tile)
    equal = math.ceil(rows / max(1, math.ceil(rows / most)))
    return max(tile, math.ceil(equal / tile) * tile)


def fused_log_probs(rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: Head) -> torch.Tensor:
    """Compute log-probs and, on request, entropies: [k, h], [v, h], [k] -> [k, 1 or 2] fp32."""
    if not torch.is_grad_enabled() or not (rows.requires_grad or weight.requires_grad):
        return _stats(rows, weight, targets, head, _buffer(rows, weight, head)).columns()
    if weight.requires_grad or head.entropy:
        # With entropy, computing the gradient in forward would save no matrix product and need more memory.
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
        ctx.weight = weight  # the parameter itself, because main_grad is its attribute
        ctx.head = head
        return stats.columns()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        rows = ctx.saved_tensors[0]
        d_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        d_weight = WeightGradient(ctx.weight) if ctx.needs_input_grad[1] else None
        _add_gradients(ctx, grad, d_rows, d_weight)  # frees its buffer before one more tensor of the weight's size
        return d_rows, None if d_weight is None else d_weight.for_autograd(), None, None


def _add_gradients(ctx: Any, grad: torch.Tensor, d_rows: torch.Tensor | None, d_weight: WeightGradient | None) -> None:
    """Compute the gradients of rows and weight from `grad`, [k, 1 or 2], chunk by chunk."""
    rows, targets, *saved = ctx.saved_tensors
    stats = RowStats(*saved)
    weight = ctx.weight
    head: Head = ctx.head
    computed = ctx.buffer is not None  # False in a second backward through a retained graph
    buffer = ctx.buffer if computed else _buffer(rows, weight, head)
    ctx.buffer = None
    for chunk in reversed(_chunks(rows, head)):
        logits = buffer[: chunk.stop - chunk.start]
        if not computed:
            logits_into(logits, rows[chunk], weight)
        computed = False  # the buffer held the last chunk's only
        d_logits = to_gradient_(logits, targets[chunk], stats.of(chunk), grad[chunk], head.vocabulary)
        if d_rows is not None:
            d_rows[chunk] = d_rows_of(d_logits, weight)
        if d_weight is not None:
            d_weight.add(d_logits, rows[chunk])


class _KnownInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: Head) -> torch.Tensor:
        logprobs = torch.empty(len(rows), 1, dtype=torch.float32, device=rows.device)
        slopes = torch.empty_like(rows)  # d logprob / d row
        buffer = _buffer(rows, weight, head)
        for chunk in _chunks(rows, head):
            logits = logits_into(buffer[: chunk.stop - chunk.start], rows[chunk], weight)
            # The gradient needs whole rows, so tensor-parallel ranks exchange statistics once per chunk here.
            stats = stats_of_rows(logits, targets[chunk], head.vocabulary, entropy=False)
            logprobs[chunk, 0] = stats.logprob
            one = torch.ones_like(stats.logprob)[:, None]
            slopes[chunk] = d_rows_of(to_gradient_(logits, targets[chunk], stats, one, head.vocabulary), weight)
        ctx.save_for_backward(slopes)
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        [slopes] = ctx.saved_tensors
        return (slopes * grad).to(slopes.dtype), None, None, None


def _chunks(rows: torch.Tensor, head: Head) -> list[slice]:
    return [slice(begin, min(begin + head.chunk, len(rows))) for begin in range(0, len(rows), head.chunk)]


def _buffer(rows: torch.Tensor, weight: torch.Tensor, head: Head) -> torch.Tensor:
    """Allocate the buffer, [c, v], that holds the logits of one chunk at a time."""
    return torch.empty(min(head.chunk, len(rows)), len(weight), dtype=rows.dtype, device=rows.device)


def _stats(
    rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: Head, buffer: torch.Tensor
) -> RowStats:
    """Compute the statistics of all rows, with one exchange; the logits of the last chunk stay in the buffer."""
    sums = torch.empty(4 if head.entropy else 3, len(rows), dtype=torch.float32, device=rows.device)
    for chunk in _chunks(rows, head):
        logits = logits_into(buffer[: chunk.stop - chunk.start], rows[chunk], weight)
        sums[:, chunk] = sums_of_rows(logits, targets[chunk], head.vocabulary, head.entropy)
    return combine(over_ranks(sums, head.vocabulary.group), head.vocabulary.temperature)
