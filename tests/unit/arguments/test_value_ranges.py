"""Numbers outside of their range are refused by flag, each message with a value that is then accepted."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields
from functools import partial
from typing import Any

import pytest

from swift_megatron_grpo.arguments.value_ranges import (
    RANGES,
    check_ranges,
    check_schedule,
    check_weight_decay,
)


def defaults() -> dict[str, Any]:
    from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments

    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(GRPOArguments)
    }


def error_of(**changes: Any) -> str:
    """Return the errors of all checks for these values, the other flags at their defaults."""
    values, problems = defaults() | changes, []
    for check in (partial(check_ranges, defaults=defaults()), check_schedule, check_weight_decay):
        try:
            check(values)
        except ValueError as problem:
            problems.append(str(problem))
    return "\n".join(problems)


def test_the_table_names_flags_and_accepts_every_default() -> None:
    assert set(RANGES) <= set(defaults())
    assert error_of() == ""


@pytest.mark.parametrize("flag", RANGES)
def test_values_outside_of_the_table_are_refused_with_one_that_is_accepted(flag: str) -> None:
    valid = RANGES[flag]
    wrong = [math.nan, math.inf, -math.inf, valid.low if valid.above_low else valid.low - 1]
    wrong += [] if math.isinf(valid.high) else [valid.high if valid.below_high else valid.high + 1]
    for value in wrong:
        message = error_of(**{flag: value})
        typed = str(value) if isinstance(value, int) else f"{value:g}"
        assert message.startswith(f"--{flag} {typed} must be "), (value, message)
        assert f"; use --{flag} {valid.use}" in message
    assert float(valid.use) in valid


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("max_length", (0, 1, -1)),
        ("temperature", (0.0, 1e-9, 0.009, -1.0)),
        ("lr", (0.0, -1e-6, math.inf, math.nan)),
        ("adam_beta1", (1.0,)),
        ("lora_alpha", (0.0,)),
        ("logging_steps", (0,)),
        ("top_p", (1.5, 0.0)),
        ("top_k", (-2,)),
        ("repetition_penalty", (0.0,)),
        ("weight_decay", (-1.0,)),
    ],
)
def test_values_that_trained_wrongly_or_failed_late_are_refused(flag: str, values: tuple[float, ...]) -> None:
    for value in values:
        assert error_of(**{flag: value}).startswith(f"--{flag} {value:g} must be ")


def test_numbers_without_a_range_must_be_finite() -> None:
    assert error_of(vllm_server_timeout=math.nan) == "--vllm_server_timeout nan is not a finite number; use " + (
        "--vllm_server_timeout 240.0"
    )
    assert "--moe_aux_loss_coeff inf is not a finite number" in error_of(moe_aux_loss_coeff=[0.0, math.inf])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 1e-6, "min_lr": 0.1}, "--min_lr 0.1 must not be above --lr 1e-06; use --min_lr 0"),
        ({"lr": 1e-6, "lr_warmup_init": 0.1}, "--lr_warmup_init 0.1 must not be above --lr 1e-06"),
        ({"train_iters": 100, "lr_warmup_iters": 1000000}, "must be below the 100 iterations of training"),
        ({"train_iters": 100, "lr_decay_iters": 5, "lr_warmup_iters": 5}, "use --lr_warmup_iters 0"),
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
