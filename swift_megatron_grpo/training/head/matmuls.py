"""The head's three matrix products, and the gradient of its weight, accumulated in fp32 for every input type.

cuBLAS reads bf16 and writes fp32, also accumulating into the output. Many CPUs multiply bf16 one number at a time (a
hundredth of the speed of fp32), so there blocks of the vocabulary are converted to fp32.

c: rows; h: hidden size; v: vocabulary of this tensor-parallel rank.
"""

from collections.abc import Iterator
from typing import Any

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


class WeightGradient:
    """Accumulates the gradient of one weight over the chunks of a backward pass, in `main_grad` if that is fp32.

    Megatron's contract with layers that accumulate into its gradient buffer themselves: they add to `weight.main_grad`,
    set `weight.grad_added_to_main_grad`, and return a tensor of the weight's shape to autograd, because that triggers
    DDP's hook, which may start the reduction. The hook ignores the tensor unless `weight.zero_out_wgrad` is set, which
    marks a weight that is tied to the embedding: the tensor then has the embedding's gradient added, so ours must be
    zeros.
    """

    def __init__(self, weight: Any) -> None:  # the parameter, with the attributes that DDP sets
        self._weight = weight
        # main_grad is bf16 when gradients are reduced in bf16; chunks are then summed in a separate fp32 tensor.
        self._in_place = hasattr(weight, "grad_added_to_main_grad") and weight.main_grad.dtype == torch.float32
        if self._in_place:
            self.total: torch.Tensor = weight.main_grad
        else:
            self.total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)

    def add(self, d_logits: torch.Tensor, rows: torch.Tensor) -> None:
        """Add d_logits^T @ rows, of shapes [c, v] and [c, h]."""
        add_d_weight_(self.total, d_logits, rows)

    def for_autograd(self) -> torch.Tensor:
        """Return the tensor that backward returns for the weight: the gradient, or zeros if main_grad has it."""
        if not self._in_place:
            return self.total.to(self._weight.dtype)
        self._weight.grad_added_to_main_grad = True
        return torch.zeros_like(self._weight)


def _blocks(columns: int) -> Iterator[slice]:
    return (slice(begin, begin + _BLOCK) for begin in range(0, columns, _BLOCK))
