"""Give each expert a parameter as Megatron's DDP has it, with the hook that adds its gradient to the buffer."""

from __future__ import annotations

from typing import Any

import torch


def parameters_of(
    stacked: torch.Tensor, main_grad: torch.Tensor | None
) -> tuple[list[torch.nn.Parameter], list[torch.autograd.graph.Node]]:
    """Return a parameter per expert, a view of the stacked weights, and the nodes that have the hooks.

    Without a gradient buffer they are frozen, and have no hooks.
    """
    parameters = [torch.nn.Parameter(weight, requires_grad=main_grad is not None) for weight in stacked]
    if main_grad is None:
        return parameters, []
    return parameters, [hook_as_in_megatron(*pair) for pair in zip(parameters, main_grad, strict=True)]


def hook_as_in_megatron(parameter: torch.nn.Parameter, main_grad: torch.Tensor) -> torch.autograd.graph.Node:
    """Give a parameter the attributes and the hook of Megatron's DDP (distributed_data_parallel.py).

    Return the node that has the hook. It lives only as long as something refers to it.
    """
    weight: Any = parameter
    weight.main_grad, weight.grad_added_to_main_grad = main_grad, False

    def hook(*_: Any) -> None:
        if weight.grad is not None and (not weight.grad_added_to_main_grad or getattr(weight, "zero_out_wgrad", False)):
            weight.main_grad.add_(weight.grad.data)
        weight.grad = None

    expanded: Any = parameter.expand_as(parameter).grad_fn
    node: torch.autograd.graph.Node = expanded.next_functions[0][0]
    node.register_hook(hook)
    return node
