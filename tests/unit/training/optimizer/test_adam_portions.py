"""Steps of Adam over portions give the same bits as one over all weights, and no portion is larger than the limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from swift_megatron_grpo.platforms.cpu.transformer_engine.optimizers import FusedAdam
from swift_megatron_grpo.training.optimizer import adam_portions
from swift_megatron_grpo.training.optimizer.adam_portions import in_portions, portions

SIZES = [[3, 9, 2, 2, 30, 1], [5], []]  # of the parameters of three groups
STEPS = 3


@pytest.fixture(autouse=True)
def _portions_of_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam_portions, "LARGEST", 10)


def optimizer(moments: torch.dtype) -> FusedAdam:
    generator = torch.Generator().manual_seed(0)
    groups: list[dict[str, Any]] = [
        {"params": [torch.randn(size, generator=generator).bfloat16() for size in sizes], "lr": 10.0**-place}
        for place, sizes in enumerate(SIZES, 1)
    ]
    return FusedAdam(
        groups, exp_avg_dtype=moments, exp_avg_sq_dtype=moments, master_weights=True, store_param_remainders=True
    )


def run(adam: FusedAdam, step: Callable[..., Any]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for group in adam.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
        step(adam)
    return {
        "steps": [group.get("step") for group in adam.param_groups],
        "weights": [[p.clone() for p in group["params"]] for group in adam.param_groups],
        "states": [adam.state[p] for group in adam.param_groups for p in group["params"]],
    }


@pytest.mark.parametrize("moments", [torch.bfloat16, torch.float16], ids=str)
def test_all_bits_are_those_of_one_step(moments: torch.dtype) -> None:
    largest: list[int] = []

    def counted(adam: FusedAdam, *arguments: Any) -> Any:
        largest.append(max(sum(p.numel() for p in group["params"]) for group in adam.param_groups))
        return FusedAdam.step.__wrapped__(adam, *arguments)  # type: ignore[attr-defined]

    expected = run(optimizer(moments), FusedAdam.step)
    found = run(optimizer(moments), in_portions(counted))
    assert largest == STEPS * [3, 9, 4, 30, 1, 5]
    assert found["steps"] == expected["steps"] == [STEPS, STEPS, None]
    assert [[p.tolist() for p in group] for group in found["weights"]] == [
        [p.tolist() for p in group] for group in expected["weights"]
    ]
    for one, other in zip(found["states"], expected["states"], strict=True):
        assert set(one) == {"exp_avg", "exp_avg_sq", "master_param"}
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_moments_in_fp32_are_not_copied_so_that_one_step_has_all_weights() -> None:
    calls: list[int] = []
    in_portions(lambda adam, *_: calls.append(len(adam.param_groups)))(optimizer(torch.float32))
    assert calls == [3]


def test_a_step_that_fails_leaves_the_groups_as_they_were() -> None:
    adam = optimizer(torch.bfloat16)
    before = [(group, list(group["params"])) for group in adam.param_groups]

    def failing(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        in_portions(failing)(adam)
    assert [group["params"] for group in adam.param_groups] == [params for _, params in before]


def test_every_parameter_is_in_one_portion_and_a_large_one_is_alone() -> None:
    sizes = [10, 1, 11, 9, 1, 1]
    parameters = [torch.zeros(size) for size in sizes]
    assert [[p.numel() for p in portion] for portion in portions(parameters)] == [[10], [1], [11], [9, 1], [1]]
    assert list(portions([])) == []
