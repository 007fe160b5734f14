"""training/forgotten.py: memory is really given back in between, and gradients are the same to the bit."""

from __future__ import annotations

from typing import Any

import torch

from swift_megatron_grpo.training.forgotten import forget, maker_of, shares_memory


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


def run(forgetting: bool) -> tuple[list[torch.Tensor], list[int]]:
    """Two layers, each of a gate and a product. Gradients; and the sizes of what the products keep, before backward."""
    torch.manual_seed(0)
    x = torch.randn(5, 3, 8, requires_grad=True)
    weights = [torch.randn(8, 4, requires_grad=True) for _ in range(2)]
    kept, hidden = [], x
    for weight in weights:
        inner = Gate.apply(hidden.view(-1, 8)).view(5, 3, 4)
        output = torch.nn.functional.linear(inner, weight)
        if forgetting:
            node: Any = maker_of(inner, "GateBackward")
            forget(inner, lambda node=node: gate(node.saved_tensors[0]), behind=output)
        kept.append(inner.untyped_storage())
        hidden = output
    sizes = [memory.nbytes() for memory in kept]
    (hidden.square().sum() + x.sum()).backward()
    return [each.grad for each in (x, *weights) if each.grad is not None], sizes


def test_gradients_are_the_same_and_the_memory_is_gone_in_between() -> None:
    plain, sizes = run(forgetting=False)
    mine, freed = run(forgetting=True)
    assert len(mine) == 3 and all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))
    assert sizes == [5 * 3 * 4 * 4] * 2 and freed == [0, 0]


def test_a_maker_is_found_through_views_only() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    made = Gate.apply(x)
    assert maker_of(made.view(2, 2, 4), "GateBackward") is made.grad_fn
    assert maker_of(made * 2, "GateBackward") is None
    assert maker_of(x, "GateBackward") is None


def test_memory_is_shared_by_views() -> None:
    x = torch.randn(4, 8)
    assert shares_memory(x, x.view(-1)) and not shares_memory(x, x.clone())
