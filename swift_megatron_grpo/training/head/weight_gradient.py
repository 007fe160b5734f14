"""The gradient of a weight, summed in fp32 over the chunks of a backward pass.

Megatron's contract with layers that add to its gradient buffer themselves: they add to `weight.main_grad`, set
`weight.grad_added_to_main_grad`, and give autograd a tensor of the weight's shape, because DDP's hook, which may start
the reduction, waits for it. The hook ignores that tensor, except where `weight.zero_out_wgrad` says that the weight is
tied to the embedding: then the embedding's part is in it, and ours must be zeros.
"""

from __future__ import annotations

from typing import Any

import torch

from swift_megatron_grpo.training.head.matmuls import add_d_weight_


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
        add_d_weight_(self.total, d_logits, rows)

    def for_autograd(self) -> torch.Tensor:
        if not self._in_place:
            return self.total.to(self._weight.dtype)
        self._weight.grad_added_to_main_grad = True
        return torch.zeros_like(self._weight)
