"""training/forgotten.py: memory is really given back in between, and gradients are the same to the bit."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from swift_megatron_grpo.training.memory.recompute_elementwise import drop_and_recompute, producing_node, shares_memory


class Gate(torch.autograd.Function):
    """Stands where SwiGLU does: its node keeps its input."""

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
    sizes: list[int]  # of what each product keeps, before backward
    inputs_alive: list[bool]  # of the gates, after backward, while the loss and with it the graph is there


def run(forgetting: bool) -> Run:
    """Two layers, each of a gate and a product."""
    torch.manual_seed(0)
    x = torch.randn(5, 3, 8, requires_grad=True)
    weights = [torch.randn(8, 4, requires_grad=True) for _ in range(2)]
    kept, inputs, hidden = [], [], x
    for weight in weights:
        gate_and_up = hidden.view(-1, 8) * 1
        inner = Gate.apply(gate_and_up).view(5, 3, 4)
        output = torch.nn.functional.linear(inner, weight)
        if forgetting:
            assert producing_node(inner, "GateBackward") is not None
            known = gate_and_up.detach()
            drop_and_recompute(inner, lambda out, known=known: out.copy_(gate(known).view(out.shape)), behind=output)
        kept.append(inner.untyped_storage())
        inputs.append(weakref.ref(known if forgetting else gate_and_up))
        hidden = output
    del gate_and_up, inner, output
    known = None
    sizes = [memory.nbytes() for memory in kept]
    loss = hidden.square().sum() + x.sum()
    loss.backward()
    gradients = [each.grad for each in (x, *weights) if each.grad is not None]
    return Run(gradients, sizes, [each() is not None for each in inputs])


def test_gradients_are_the_same_and_the_memory_is_gone_in_between() -> None:
    plain, mine = run(forgetting=False), run(forgetting=True)
    assert len(mine.gradients) == 3
    assert all(torch.equal(a, b) for a, b in zip(mine.gradients, plain.gradients, strict=True))
    assert plain.sizes == [5 * 3 * 4 * 4] * 2 and mine.sizes == [0, 0]


def test_nothing_is_held_until_the_end_of_backward() -> None:
    assert run(forgetting=True).inputs_alive == [False, False]


def test_a_maker_is_found_through_views_only() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    made = Gate.apply(x)
    assert producing_node(made.view(2, 2, 4), "GateBackward") is made.grad_fn
    assert producing_node(made * 2, "GateBackward") is None
    assert producing_node(x, "GateBackward") is None


def test_memory_is_shared_by_views() -> None:
    x = torch.randn(4, 8)
    assert shares_memory(x, x.view(-1)) and not shares_memory(x, x.clone())
