"""One kernel for the products of all experts, torch's grouped_mm, for autograd and for the hooks of Megatron's DDP."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


class GroupedProduct(torch.autograd.Function):
    """Multiply the rows of each expert by its weight; backward adds to the gradient buffer, if there is one.

    Rows of an expert may be of any number, also 0: the kernels require 16-byte alignment only of the dimensions that
    are contiguous in memory, and rows are not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        stacked: torch.Tensor,
        ends: torch.Tensor,
        main_grad: torch.Tensor | None,
        *parameters: torch.nn.Parameter,
    ) -> torch.Tensor:
        ctx.save_for_backward(None if main_grad is None else x, stacked, ends)
        ctx.main_grad, ctx.parameters = main_grad, parameters
        return grouped_mm(x, stacked.transpose(-2, -1), ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, stacked, ends = ctx.saved_tensors
        grad = grad.contiguous()
        d_x = grouped_mm(grad, stacked, ends)
        if ctx.main_grad is None:
            return d_x, None, None, None, *[None] * len(ctx.parameters)
        ctx.main_grad.add_(grouped_mm(grad.t(), x, ends))
        for parameter in ctx.parameters:
            parameter.grad_added_to_main_grad = True
        return d_x, None, None, None, *(dummy_grad(parameter) for parameter in ctx.parameters)


_dummy_grads: dict[torch.Size, torch.Tensor] = {}


def dummy_grad(parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient that nobody reads: autograd runs a parameter's hook only if it has one."""
    if parameter.shape not in _dummy_grads:
        _dummy_grads[parameter.shape] = torch.empty_like(parameter, requires_grad=False)
    return _dummy_grads[parameter.shape].detach()


def grouped_mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    function: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm
    product: torch.Tensor = function(a, b, offs=ends)
    return product
