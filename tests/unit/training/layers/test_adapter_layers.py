"""The product with an adapter in it against fp64, and where its gradients go."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swift_megatron_grpo.training.layers.adapter_layers import AdaptedProduct

TOKENS, BATCH, IN, OUT, RANK, SCALING = 6, 2, 12, 20, 3, 1.75


def make(dtype: torch.dtype, with_bias: bool = True) -> dict[str, Any]:
    torch.manual_seed(0)
    draw = {
        "x": torch.randn(TOKENS, BATCH, IN),
        "weight": torch.randn(OUT, IN),
        "bias": torch.randn(OUT) if with_bias else None,
        "down": torch.randn(RANK, IN),
        "up": torch.randn(OUT, RANK),
    }
    tensors = {name: None if tensor is None else tensor.to(dtype) for name, tensor in draw.items()}
    for name in ("x", "down", "up"):
        tensors[name] = torch.nn.Parameter(tensors[name])
    return tensors


def product(tensors: dict[str, Any], gradients_have_hooks: bool = True) -> torch.Tensor:
    inputs = (tensors[name] for name in ("x", "weight", "bias", "down", "up"))
    output: torch.Tensor = AdaptedProduct.apply(*inputs, SCALING, gradients_have_hooks)
    return output


def exact(tensors: dict[str, Any], direction: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the output, and the gradients of x, down and up."""
    doubles = {name: None if t is None else t.detach().double() for name, t in tensors.items()}
    leaves = [doubles[name].requires_grad_() for name in ("x", "down", "up")]
    merged = doubles["weight"] + SCALING * doubles["up"] @ doubles["down"]
    output = torch.nn.functional.linear(doubles["x"], merged, doubles["bias"])
    return output, list(torch.autograd.grad(output, leaves, direction.double()))


@pytest.mark.parametrize("with_bias", [True, False])
def test_output_and_gradients_are_those_of_the_merged_weight(with_bias: bool) -> None:
    tensors = make(torch.float64, with_bias)
    output = product(tensors)
    direction = torch.randn_like(output)
    output.backward(direction)
    expected, gradients = exact(tensors, direction)
    assert torch.allclose(output, expected, rtol=1e-12, atol=1e-12)
    for name, gradient in zip(("x", "down", "up"), gradients, strict=True):
        assert torch.allclose(tensors[name].grad, gradient, rtol=1e-12, atol=1e-12), name


def test_bf16_is_as_near_as_its_rounding() -> None:
    tensors = make(torch.bfloat16)
    output = product(tensors)
    direction = torch.randn_like(output)
    output.backward(direction)
    expected, gradients = exact(tensors, direction)
    for found, wanted in zip(
        [output, *(tensors[n].grad for n in ("x", "down", "up"))], [expected, *gradients], strict=True
    ):
        assert (found.double() - wanted).norm() / wanted.norm() < 2**-7


@pytest.mark.parametrize("hooks", [False, True])
def test_gradients_are_added_to_the_buffer_unless_something_waits_for_them(hooks: bool) -> None:
    tensors = make(torch.float32)
    for name in ("down", "up"):
        tensors[name].main_grad = torch.ones_like(tensors[name])
    output = product(tensors, gradients_have_hooks=hooks)
    direction = torch.randn_like(output)
    output.backward(direction)
    _, [_, d_down, d_up] = exact(tensors, direction)
    for name, wanted in (("down", d_down), ("up", d_up)):
        parameter = tensors[name]
        assert (parameter.grad is not None) == hooks
        found = parameter.grad if hooks else parameter.main_grad - 1
        assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_an_input_without_gradient_gets_none() -> None:
    tensors = make(torch.float32)
    tensors["x"].requires_grad_(False)
    product(tensors).sum().backward()
    assert tensors["x"].grad is None and tensors["down"].grad is not None


def test_the_output_is_new_memory_of_the_inputs_shape() -> None:
    tensors = make(torch.float32)
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    assert product(tensors).shape == (TOKENS, BATCH, OUT)
    assert all(torch.equal(tensors[name], before[name]) for name in before)
