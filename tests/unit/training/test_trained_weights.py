"""One non-finite element among the weights is found, and the weight is named."""

from __future__ import annotations

import math

import pytest
import torch

from swift_megatron_grpo.training.trained_weights import TrainedWeights

DEVICE = torch.device("cpu")


def model() -> torch.nn.Module:
    """Return weights of two types, as of a mixture of experts with fp32 routers, and a frozen one that is NaN."""
    weights = torch.nn.Module()
    weights.linear = torch.nn.Linear(64, 33).bfloat16()
    weights.router = torch.nn.Linear(4, 4)
    weights.frozen = torch.nn.Parameter(torch.tensor([math.nan]), requires_grad=False)
    return weights


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["linear.weight", "linear.bias", "router.weight"])
def test_a_single_element_is_found_and_its_weight_is_named(name: str, value: float) -> None:
    weights = model()
    trained = TrainedWeights([weights])
    assert trained.broken(DEVICE).item() == 0 and trained.broken_names() == []
    weights.get_parameter(name).data.view(-1)[-1] = value
    assert trained.broken(DEVICE).item() == 1
    assert trained.broken_names() == [name]


def test_large_finite_weights_pass() -> None:
    weights = model()
    weights.get_parameter("linear.weight").data.fill_(1e30)  # their squares would overflow
    assert TrainedWeights([weights]).broken(DEVICE).item() == 0


def test_a_rank_without_trained_weights_has_none_that_is_broken() -> None:
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    assert TrainedWeights([frozen]).broken(DEVICE).item() == 0
