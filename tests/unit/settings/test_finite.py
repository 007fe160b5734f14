"""Numbers that no computation can have are refused before the models load."""

from __future__ import annotations

import math

import pytest

from swift_megatron_grpo.settings.algorithm import Algorithm
from swift_megatron_grpo.settings.losses import LossConfig
from tests.unit.settings.flags import faults


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_without_a_range_is_finite(value: float) -> None:
    message = f"--entropy_coef {value:g} must be a finite number; leave it out for its default"
    assert message in faults(LossConfig, entropy_coef=value) and message not in faults(LossConfig, entropy_coef=0.1)


def test_maxrl_refuses_penalties_at_start() -> None:
    for flags in ({"reward_funcs": ["format", "soft_overlong"]}, {"reward_weights": [-1.0]}):
        found = faults(Algorithm, advantage_estimator="maxrl", **flags)
        assert "needs rewards of at least 0" in found
