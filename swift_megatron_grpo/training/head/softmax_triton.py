"""The two functions of softmax.py that touch logits, as Triton kernels (CUDA only): each goes over them once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from swift_megatron_grpo.training.head.row_statistics import LOWEST, RowStats, Vocabulary

_FLOOR = tl.constexpr(LOWEST)
_WIDEST = 8192  # columns that one program holds at a time


def sums_of_rows(logits: torch.Tensor, targets: torch.Tensor, vocabulary: Vocabulary, entropy: bool) -> torch.Tensor:
    """Compute what softmax.sums_of_rows computes."""
    rows, columns = logits.shape
    assert logits.is_contiguous() and targets.is_contiguous()
    sums = torch.empty(4 if entropy else 3, rows, dtype=torch.float32, device=logits.device)
    if rows:
        block = min(_WIDEST, triton.next_power_of_2(columns))
        _sums_of_rows[(rows,)](
            logits, targets, sums, rows, columns, vocabulary.real, vocabulary.first, 1.0 / vocabulary.temperature,
            ENTROPY=entropy, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return sums


def to_gradient_(
    logits: torch.Tensor, targets: torch.Tensor, stats: RowStats, upstream: torch.Tensor, vocabulary: Vocabulary
) -> torch.Tensor:
    """Overwrite logits as softmax.to_gradient_ does."""
    rows, columns = logits.shape
    assert logits.is_contiguous() and targets.is_contiguous()
    upstream = upstream.float().contiguous()
    if rows:
        block = min(_WIDEST // 2, triton.next_power_of_2(columns))
        _to_gradient[(rows, triton.cdiv(columns, block))](
            logits, targets, stats.peak, stats.log_total, stats.peak if stats.entropy is None else stats.entropy,
            upstream, columns, vocabulary.real, vocabulary.first, 1.0 / vocabulary.temperature,
            ENTROPY=stats.entropy is not None, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return logits


def _warps(block: int) -> int:
    """Return the number of warps that gives every thread 16 columns."""
    return max(1, block // 512)


@triton.jit  # type: ignore[untyped-decorator]
def _sums_of_rows(  # type: ignore[no-untyped-def]  # Triton compiles annotations too, and accepts constexpr only
    logits,  # [rows, columns]
    targets,  # [rows] int64
    sums,  # [3 or 4, rows] fp32, out
    rows,
    columns,
    real,
    first,
    inverse_temperature,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * columns
    offsets = tl.arange(0, BLOCK)
    peak = _FLOOR * 1.0
    # One sum per position in the block, added up at the end: fewer roundings, and one reduction less per block.
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, real, BLOCK):
        inside = begin + offsets < real
        values = tl.load(start + begin + offsets, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(values, 0))  # drops NaN, which exp below brings back
        shift = (peak - higher) * inverse_temperature
        shift = tl.where(shift < _FLOOR, _FLOOR, shift)
        rescale = tl.exp(shift)
        s = (values - higher) * inverse_temperature
        s = tl.where((s < _FLOOR) | (begin + offsets >= real), _FLOOR, s)
        e = tl.exp(s)
        if ENTROPY:
            weighted = (weighted + shift * total) * rescale + e * s
        total = total * rescale + e
        peak = higher
    local = tl.load(targets + row) - first
    here = (local >= 0) & (local < real)
    target = tl.load(start + local, mask=here, other=0.0).to(tl.float32)
    tl.store(sums + row, peak)
    tl.store(sums + rows + row, tl.sum(total, 0))
    tl.store(sums + 2 * rows + row, tl.where(here, target, _FLOOR))
    if ENTROPY:
        tl.store(sums + 3 * rows + row, tl.sum(weighted, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _to_gradient(  # type: ignore[no-untyped-def]
    logits,  # [rows, columns], in and out
    targets,  # [rows] int64
    peaks,  # [rows] fp32
    log_totals,  # [rows] fp32
    entropies,  # [rows] fp32
    upstream,  # [rows, 1 or 2] fp32
    columns,
    real,
    first,
    inverse_temperature,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + row * columns + offsets
    values = tl.load(place, mask=offsets < real, other=0.0).to(tl.float32)
    logp = (values - tl.load(peaks + row)) * inverse_temperature - tl.load(log_totals + row)
    if ENTROPY:
        of_logprob = tl.load(upstream + 2 * row)
        finite = tl.where(logp < _FLOOR, _FLOOR, logp)
        pull = of_logprob + tl.load(upstream + 2 * row + 1) * (finite + tl.load(entropies + row))
    else:
        of_logprob = tl.load(upstream + row)
        pull = of_logprob
    grad = -tl.exp(logp) * pull
    local = tl.load(targets + row) - first
    grad = tl.where(offsets == local, grad + of_logprob, grad) * inverse_temperature
    grad = tl.where(offsets < real, grad, 0.0)
    tl.store(place, grad.to(logits.dtype.element_ty), mask=offsets < columns)
