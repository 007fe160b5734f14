"""The head's three matrix products, accumulated in fp32 for every input type.

cuBLAS reads bf16 and writes fp32, also accumulating into the output. Many CPUs multiply bf16 one number at a time (a
hundredth of the speed of fp32), so there blocks of the vocabulary are converted to fp32.

c: rows; h: hidden size; v: vocabulary of this tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_BLOCK = 8192  # vocabulary rows converted to fp32 at a time on the CPU


def logits_into(buffer: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute buffer [c, v] = rows [c, h] @ weight [v, h]^T, rounded to their type once."""
    if rows.is_cuda or rows.dtype == torch.float32:
        return torch.mm(rows, weight.t(), out=buffer)
    wide = rows.float()
    for block in _blocks(len(weight)):
        buffer[:, block] = wide @ weight[block].float().t()
    return buffer


def d_rows_of(d_logits: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute d_logits [c, v] @ weight [v, h], rounded to their type once."""
    if d_logits.dtype == torch.float32:
        return torch.mm(d_logits, weight)
    if d_logits.is_cuda:  # with bf16 output, cuBLAS may split the long sum over v and round the partial sums
        return torch.mm(d_logits, weight, out_dtype=torch.float32).to(d_logits.dtype)
    total = torch.zeros(len(d_logits), weight.shape[1])
    for block in _blocks(len(weight)):
        total.addmm_(d_logits[:, block].float(), weight[block].float())
    return total.to(d_logits.dtype)


def add_d_weight_(total: torch.Tensor, d_logits: torch.Tensor, rows: torch.Tensor) -> None:
    """Add d_logits [c, v]^T @ rows [c, h] to total [v, h], in fp32 and without rounding in between."""
    if d_logits.dtype == torch.float32:
        total.addmm_(d_logits.t(), rows)
    elif d_logits.is_cuda:
        torch.addmm(total, d_logits.t(), rows, out_dtype=torch.float32, out=total)
    else:
        wide = rows.float()
        for block in _blocks(len(total)):
            total[block].addmm_(d_logits[:, block].t().float(), wide)


def _blocks(columns: int) -> Iterator[slice]:
    return (slice(begin, begin + _BLOCK) for begin in range(0, columns, _BLOCK))
