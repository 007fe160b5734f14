"""Dropped activations release their memory until backward, and gradients stay bit-identical."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from swift_megatron_grpo.training.layers.fast_kernels import drop_and_recompute, producing_node, shares_memory


class Gate(torch.autograd.Function):
    """Stand-in for SwiGLU: its node saves its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return gate(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            leaf = ctx.saved_tensors[0].detach().requires_grad_()
            gate(leaf).backward(grad)
        assert leaf.grad is not None
        return leaf.grad


def gate(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.nn.functional.silu(left) * right


@dataclass(frozen=True)
class Run:
    gradients: list[torch.Tensor]
    sizes: list[int]  # bytes that each matrix product keeps, before backward
    inputs_alive: list[bool]  # inputs of the gates, after backward, while the loss and its graph still exist


def run(recomputed: bool) -> Run:
    """Train two layers, each a gate and a matrix product."""
    torch.manual_seed(0)
    x = torch.randn(5, 3, 8, requires_grad=True)
    weights = [torch.randn(8, 4, requires_grad=True) for _ in range(2)]
    kept, inputs, hidden = [], [], x
    for weight in weights:
        gate_and_up = hidden.view(-1, 8) * 1
        inner = Gate.apply(gate_and_up).view(5, 3, 4)
        output = torch.nn.functional.linear(inner, weight)
        if recomputed:
            assert producing_node(inner, "GateBackward") is not None
            source = gate_and_up.detach()
            drop_and_recompute(inner, lambda out, source=source: out.copy_(gate(source).view(out.shape)), output)
        kept.append(inner.untyped_storage())
        inputs.append(weakref.ref(source if recomputed else gate_and_up))
        hidden = output
    del gate_and_up, inner, output
    source = None
    sizes = [storage.nbytes() for storage in kept]
    loss = hidden.square().sum() + x.sum()
    loss.backward()
    gradients = [leaf.grad for leaf in (x, *weights) if leaf.grad is not None]
    return Run(gradients, sizes, [reference() is not None for reference in inputs])


def test_gradients_are_bit_identical_and_memory_is_free_until_backward() -> None:
    plain, dropped = run(recomputed=False), run(recomputed=True)
    assert len(dropped.gradients) == 3
    assert all(torch.equal(a, b) for a, b in zip(dropped.gradients, plain.gradients, strict=True))
    assert plain.sizes == [5 * 3 * 4 * 4] * 2 and dropped.sizes == [0, 0]


def test_backward_releases_the_inputs_of_recomputation() -> None:
    assert run(recomputed=True).inputs_alive == [False, False]


def test_the_producing_node_is_found_through_views_only() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    output = Gate.apply(x)
    assert producing_node(output.view(2, 2, 4), "GateBackward") is output.grad_fn
    assert producing_node(output * 2, "GateBackward") is None
    assert producing_node(x, "GateBackward") is None


def test_views_share_memory_and_clones_do_not() -> None:
    x = torch.randn(4, 8)
    assert shares_memory(x, x.view(-1)) and not shares_memory(x, x.clone())
