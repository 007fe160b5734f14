"""Schedules of the learning rate and weight decay, numbers that are not finite, and all numbers by their ranges."""

from __future__ import annotations

import math
from typing import Any

import pytest

from swift_megatron_grpo.settings.groups import GROUPS
from tests.unit.settings.flags import faults


def error_of(**typed: Any) -> str:
    """Return the faults of these flags, the others at their defaults."""
    found = [faults(group, **{"train_iters": 100} | typed) for group in GROUPS]
    return "\n".join(filter(None, found))


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("lr", (0.0, -1e-6, math.inf, math.nan)),
        ("adam_beta1", (1.0,)),
        ("lora_alpha", (0.0,)),
        ("logging_steps", (0,)),
        ("weight_decay", (-1.0,)),
    ],
)
def test_values_that_trained_wrongly_or_failed_late_are_refused(flag: str, values: tuple[float, ...]) -> None:
    for value in values:
        assert f"--{flag} {value:g} must be " in error_of(**{flag: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 1e-6, "min_lr": 0.1}, "--min_lr 0.1 must not be above --lr 1e-06; use --min_lr 0"),
        ({"lr": 1e-6, "lr_warmup_init": 0.1}, "--lr_warmup_init 0.1 must not be above --lr 1e-06"),
        ({"train_iters": 100, "lr_warmup_iters": 1000000}, "must be below the 100 iterations of training"),
        ({"train_iters": 100, "lr_decay_iters": 5, "lr_warmup_iters": 5}, "use --lr_warmup_iters 0"),
        (
            {"lr_warmup_iters": 5, "lr_warmup_fraction": 0.1},
            "--lr_warmup_iters 5 has no effect with --lr_warmup_fraction 0.1",
        ),
        ({"train_iters": 100, "lr_decay_style": "WSD"}, "use --lr_wsd_decay_iters 10, or --lr_decay_style cosine"),
        ({"start_weight_decay": 0.2}, "use --weight_decay_incr_style linear, or leave it out"),
        ({"weight_decay_incr_style": "linear"}, "use --start_weight_decay 0 --end_weight_decay 0.1"),
        (
            {"weight_decay_incr_style": "linear", "start_weight_decay": 0.2, "end_weight_decay": 0.1},
            "--start_weight_decay 0.2 must not be above --end_weight_decay 0.1",
        ),
    ],
)
def test_schedules_that_megatron_asserts_are_refused_by_flag(changes: dict[str, Any], message: str) -> None:
    assert message in error_of(**changes)


def test_the_suggested_schedules_are_accepted() -> None:
    assert error_of(lr=1e-6, min_lr=0.0, train_iters=100, lr_warmup_iters=10) == ""
    assert error_of(train_iters=100, lr_decay_style="WSD", lr_wsd_decay_iters=10) == ""
    assert error_of(weight_decay_incr_style="linear", start_weight_decay=0.0, end_weight_decay=0.1) == ""
