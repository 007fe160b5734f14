"""One product for all experts against a product per expert in fp64, and the memory of weights that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from swift_megatron_grpo.training.moe.grouped_experts import GroupedLinear, kernels_take, move_together
from swift_megatron_grpo.weights.stacked_tensors import stacked

EXPERTS, IN, OUT = 4, 16, 24
LOADS = [3, 0, 7, 1]  # an expert without tokens is between others


def per_expert(*_: Any) -> Any:
    raise AssertionError("a product per expert was asked for")


def make_weights(trained: bool = True, together: bool = True) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(OUT, IN), requires_grad=trained) for _ in range(EXPERTS)]
    if together:
        move_together(weights)
    return weights


def give_main_grads(weights: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Give each weight a part of one fp32 buffer that holds ones, as Megatron's DDP does."""
    buffer = torch.ones(EXPERTS, OUT, IN)
    for weight, part in zip(weights, buffer, strict=True):
        weight.main_grad = part  # type: ignore[attr-defined]
    return buffer


def exact(x: torch.Tensor, weights: Sequence[torch.Tensor], direction: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.detach().double().requires_grad_()
    exact_weights = [weight.detach().double().requires_grad_() for weight in weights]
    output = torch.cat([F.linear(rows, weight) for rows, weight in zip(x.split(LOADS), exact_weights, strict=True)])
    d_x, *d_weights = torch.autograd.grad(output, [x, *exact_weights], direction.double(), allow_unused=True)
    filled = [torch.zeros(OUT, IN) if grad is None else grad for grad in d_weights]
    return {"output": output, "d_x": d_x, "d_weights": torch.stack([grad.double() for grad in filled])}


def run(linear: GroupedLinear, x_needs_gradient: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(sum(LOADS), IN, requires_grad=x_needs_gradient)
    output, bias = linear(x, LOADS)
    assert bias is None
    direction = torch.randn_like(output)
    if output.requires_grad:
        output.backward(direction)
    return x, output, direction


def close(found: torch.Tensor | None, wanted: torch.Tensor) -> bool:
    return found is not None and torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("x_needs_gradient", [True, False])
def test_gradients_are_added_to_megatrons_buffer(x_needs_gradient: bool) -> None:
    weights = make_weights()
    buffer = give_main_grads(weights)
    x, output, direction = run(GroupedLinear(per_expert, weights, gradients_have_hooks=False), x_needs_gradient)
    wanted = exact(x, weights, direction)
    assert close(output, wanted["output"]) and close(buffer - 1, wanted["d_weights"])
    assert close(x.grad, wanted["d_x"]) if x_needs_gradient else x.grad is None
    assert all(weight.grad is None for weight in weights)  # nothing is left for a hook of DDP to add again


def test_each_weight_has_a_gradient_where_something_waits_for_it() -> None:
    weights = make_weights()
    buffer = give_main_grads(weights)
    x, output, direction = run(GroupedLinear(per_expert, weights, gradients_have_hooks=True))
    wanted = exact(x, weights, direction)
    assert close(output, wanted["output"]) and close(x.grad, wanted["d_x"])
    assert close(torch.stack([weight.grad for weight in weights]), wanted["d_weights"])  # type: ignore[misc]
    assert torch.equal(buffer, torch.ones_like(buffer))


def test_frozen_weights_have_no_gradient_and_pass_one_on() -> None:
    weights = make_weights(trained=False)
    x, output, direction = run(GroupedLinear(per_expert, weights, gradients_have_hooks=False))
    wanted = exact(x, weights, direction)
    assert close(output, wanted["output"]) and close(x.grad, wanted["d_x"])


def test_a_pass_without_gradients_keeps_nothing() -> None:
    with torch.no_grad():
        _, output, _ = run(GroupedLinear(per_expert, make_weights(), gradients_have_hooks=False))
    assert not output.requires_grad


def test_frozen_weights_are_joined_again_if_their_memory_was_replaced() -> None:
    weights = make_weights(trained=False)
    linear = GroupedLinear(per_expert, weights, gradients_have_hooks=False)
    weights[2].data = weights[2].data.clone()
    assert stacked(weights) is None
    x, output, direction = run(linear)
    assert close(output, exact(x, weights, direction)["output"]) and stacked(weights) is not None


def test_trained_weights_that_are_apart_have_a_product_each(caplog: pytest.LogCaptureFixture) -> None:
    calls = []
    linear = GroupedLinear(lambda x, splits: (calls.append(splits), None), make_weights(together=False), False)
    for _ in range(2):
        linear(torch.randn(sum(LOADS), IN), LOADS)
    assert calls == [LOADS, LOADS] and len(caplog.records) == 1


def test_gradients_that_are_apart_are_left_to_megatron() -> None:
    weights = make_weights()
    for weight in weights:
        weight.main_grad = torch.zeros(OUT, IN)  # type: ignore[attr-defined]
    x, _, direction = run(GroupedLinear(per_expert, weights, gradients_have_hooks=False))
    found = torch.stack([weight.grad for weight in weights])  # type: ignore[misc]
    assert close(found, exact(x, weights, direction)["d_weights"])


# ---- memory


def test_a_view_has_the_values_of_all_and_writes_to_them() -> None:
    memory = torch.arange(60.0).view(5, 12)
    parts = [memory[row, 2:8].view(2, 3) for row in range(5)]  # with gaps, as padding leaves them
    view = stacked(parts)
    assert view is not None and torch.equal(view, torch.stack(parts))
    view[3].zero_()
    assert parts[3].count_nonzero() == 0


def test_one_tensor_is_a_view_of_itself() -> None:
    view = stacked([torch.ones(2, 3)])
    assert view is not None and view.shape == (1, 2, 3)


@pytest.mark.parametrize("order", [[2, 1, 0], [0, 2, 1], [0, 1, 4], [0, 0, 0]])
def test_tensors_that_are_not_evenly_spaced_have_no_view(order: list[int]) -> None:
    memory = torch.zeros(5, 6)
    assert stacked([memory[row].view(2, 3) for row in order]) is None


def test_tensors_of_different_memories_have_no_view() -> None:
    assert stacked([torch.zeros(1000, 1000) for _ in range(3)]) is None


def test_kernels_take_tokens_of_the_precision_of_the_weights() -> None:
    weight = torch.zeros(OUT, IN)
    assert kernels_take(torch.zeros(3, IN), weight)
    assert not kernels_take(torch.zeros(0, IN), weight)
    assert not kernels_take(torch.zeros(3, IN, dtype=torch.bfloat16), weight)


@pytest.mark.parametrize(
    ("dtype", "features", "takes"),
    [(torch.float32, (8, 12), True), (torch.float32, (8, 6), False), (torch.float32, (6, 8), False),
     (torch.bfloat16, (8, 16), True), (torch.bfloat16, (8, 12), False)],
)  # fmt: skip
def test_rows_that_the_kernels_cannot_read_have_a_product_per_expert(
    dtype: torch.dtype, features: tuple[int, int], takes: bool
) -> None:
    """Torch refuses rows that are not a multiple of 16 bytes, on a CPU as well."""
    together = torch.ones(EXPERTS, *features, dtype=dtype)
    weights = [torch.nn.Parameter(weight, requires_grad=False) for weight in together]
    x = torch.ones(sum(LOADS), features[1], dtype=dtype)
    assert kernels_take(x, weights[0]) == takes
    fallback = torch.zeros(0)
    output, _ = GroupedLinear(lambda *_: (fallback, None), weights, gradients_have_hooks=False)(x, LOADS)
    assert (output is not fallback) == takes
