"""Collectives with gradients over a tensor- or context-parallel group, for the linear layers and attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function


def _all_reduced(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    tensor = tensor.contiguous().clone()
    dist.all_reduce(tensor, group=group)
    return tensor


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather along the first dimension: [s, ...] of every rank -> [ranks * s, ...]."""
    output = tensor.new_empty(group.size() * tensor.shape[0], *tensor.shape[1:])
    dist.all_gather_single(output, tensor.contiguous(), group=group)
    return output


def _reduce_scattered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over the ranks and scatter along the first dimension: [ranks * s, ...] -> [s, ...]."""
    output = tensor.new_empty(tensor.shape[0] // group.size(), *tensor.shape[1:])
    dist.reduce_scatter_single(output, tensor.contiguous(), group=group)
    return output


class CopyToGroup(Function):
    """Identity whose gradient is summed over the group, for the input of a column-parallel weight."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduced(grad, ctx.group), None


class ReduceFromGroup(Function):
    """Sum over the group whose gradient is the identity, for the output of a row-parallel weight."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _all_reduced(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class GatherSequence(Function):
    """Gather [s, ...] of every rank -> [ranks * s, ...]; the gradient is summed and scattered back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gathered(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _reduce_scattered(grad, ctx.group), None


class ReduceScatterSequence(Function):
    """Sum over the ranks and scatter [ranks * s, ...] -> [s, ...]; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _reduce_scattered(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gathered(grad, ctx.group), None
