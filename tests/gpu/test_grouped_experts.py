"""One product for all experts on a GPU, in bf16 and on memory full of NaN, against exact products of each expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from swift_megatron_grpo.training.moe.grouped_experts import GroupedLinear, move_together

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
EXPERTS = 16


def poison_free_memory() -> None:
    torch.full((2**31,), float("nan"), device="cuda", dtype=torch.bfloat16)


def per_expert(*_: Any) -> Any:
    raise AssertionError("a product per expert was asked for")


def difference(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


# hidden to gate and up, activation to hidden, and the products of adapters of rank 16 and 8
@pytest.mark.parametrize(("width", "out"), [(2048, 1536), (768, 2048), (2048, 16), (16, 1536), (8, 2048)])
@pytest.mark.parametrize("trained", [True, False])
def test_output_and_gradients_are_exact_to_the_rounding_of_bf16(width: int, out: int, trained: bool) -> None:
    torch.manual_seed(0)
    loads = [0, 1, 7, 300, 64, 0, 1000, 33, 128, 2, 511, 0, 90, 257, 16, 0]
    assert len(loads) == EXPERTS
    weights = [
        torch.nn.Parameter(torch.randn(out, width, device="cuda", dtype=torch.bfloat16) / width**0.5, trained)
        for _ in range(EXPERTS)
    ]
    move_together(weights)
    main_grad = torch.ones(EXPERTS, out, width, device="cuda")
    for weight, part in zip(weights, main_grad, strict=True):
        weight.main_grad = part  # type: ignore[attr-defined]
    x = torch.randn(sum(loads), width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    poison_free_memory()
    output, _ = GroupedLinear(per_expert, weights, gradients_have_hooks=False)(x, loads)
    direction = torch.randn_like(output)
    poison_free_memory()
    output.backward(direction)

    exact_x = x.detach().double().requires_grad_()
    exact_weights = [weight.detach().double().requires_grad_() for weight in weights]
    rows = zip(exact_x.split(loads), exact_weights, strict=True)
    exact = torch.cat([F.linear(part, weight) for part, weight in rows])
    d_x, *d_weights = torch.autograd.grad(exact, [exact_x, *exact_weights], direction.double())
    assert x.grad is not None
    assert difference(output, exact) < 0.005 and difference(x.grad, d_x) < 0.005
    assert difference(main_grad - 1, torch.stack(d_weights)) < 0.005 if trained else (main_grad == 1).all()
