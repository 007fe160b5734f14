"""The gradient of a weight, summed in fp32 over the chunks of a backward pass.

Megatron's contract with layers that add to its gradient buffer themselves: they add to `weight.main_grad`, set
`weight.grad_added_to_main_grad`, and give autograd a tensor of the weight's shape, because DDP's hook, which may start
the reduction, waits for it. The hook ignores that tensor, except where `weight.zero_out_wgrad` says that the weight is
tied to the embedding: then the embedding's part is in it, and ours must be zeros.
"""

from __future__ import annotations

from typing import Any

import torch

_COLUMNS = 8192  # of bf16 copied to fp32 at a time on the CPU


class WeightGradient:
    def __init__(self, weight: Any) -> None:  # the parameter, with what DDP hangs on it
        self._weight = weight
        # main_grad is bf16 when gradients are reduced in bf16; chunks are summed in fp32 all the same.
        self._in_place = hasattr(weight, "grad_added_to_main_grad") and weight.main_grad.dtype == torch.float32
        if self._in_place:
            self.total: torch.Tensor = weight.main_grad
        else:
            self.total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)

    def add(self, d_logits: torch.Tensor, rows: torch.Tensor) -> None:
        """[c, v], [c, h]: adds d_logits^T rows."""
        add_product_(self.total, d_logits, rows)

    def for_autograd(self) -> torch.Tensor:
        if not self._in_place:
            return self.total.to(self._weight.dtype)
        self._weight.grad_added_to_main_grad = True
        return torch.zeros_like(self._weight)


def add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total [v, h] fp32 += left [c, v]^T @ right [c, h], without rounding the product to their type."""
    if left.dtype == torch.float32:
        total.addmm_(left.t(), right)
    elif left.is_cuda:
        torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)
    else:
        wide = right.float()
        for columns in range(0, len(total), _COLUMNS):
            part = slice(columns, columns + _COLUMNS)
            total[part].addmm_(left[:, part].t().float(), wide)


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left [c, v] @ right [v, h] in their type, rounded to it once: with many columns, cuBLAS may split the sum and
    round its parts to bf16."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32).to(left.dtype)
    return torch.mm(left, right)
