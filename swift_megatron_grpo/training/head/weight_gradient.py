"""The gradient of a weight, accumulated in fp32 over the chunks of a backward pass.

Megatron's contract with layers that accumulate into its gradient buffer themselves: they add to `weight.main_grad`, set
`weight.grad_added_to_main_grad`, and return a tensor of the weight's shape to autograd, because that triggers DDP's
hook, which may start the reduction. The hook ignores the tensor unless `weight.zero_out_wgrad` is set, which marks a
weight that is tied to the embedding: the tensor then has the embedding's gradient added, so ours must be zeros.
"""

from __future__ import annotations

from typing import Any

import torch

from swift_megatron_grpo.training.head.matmuls import add_d_weight_


class WeightGradient:
    """Accumulates the gradient of one weight, in `main_grad` if that is fp32."""

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
