"""Every flag is described in one class, with the type and under the name that the parser has."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields
from typing import get_type_hints

import pytest

from swift_megatron_grpo.settings.flag import Flags, is_group, ranges
from swift_megatron_grpo.settings.groups import GROUPS, RANGES
from tests.unit.settings.flags import defaults, faults, of


def described(group: type[Flags]) -> set[str]:
    return {field.name for field in fields(group) if "flag" in field.metadata} | set(ranges(group))


def test_no_flag_is_described_twice() -> None:
    places = Counter(name for group in GROUPS for name in described(group))
    assert {name for name, count in places.items() if count > 1} == set()


def test_classes_agree_on_the_types_of_flags_and_name_flags_only() -> None:
    names = {name for group in GROUPS for name, hint in get_type_hints(group).items() if not is_group(hint)}
    assert names <= set(defaults())
    hints: dict[str, set[str]] = {}
    for group in GROUPS:
        for name, hint in get_type_hints(group).items():
            if not is_group(hint):
                hints.setdefault(name, set()).add(str(hint))
    del hints["vllm_mode"], hints["vllm_max_model_len"]
    assert {name: kinds for name, kinds in hints.items() if len(kinds) > 1} == {}


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_the_defaults_are_those_of_the_parser_and_accepted(group: type[Flags]) -> None:
    assert of(group).changed() == []
    assert faults(group, train_iters=1) == ""


@pytest.mark.parametrize("flag", RANGES)
def test_values_outside_of_a_range_are_refused_with_one_that_is_accepted(flag: str) -> None:
    [group] = (group for group in GROUPS if flag in ranges(group))
    valid = RANGES[flag]
    wrong = [math.nan, math.inf, -math.inf, valid.low if valid.above_low else valid.low - 1]
    wrong += [] if math.isinf(valid.high) else [valid.high if valid.below_high else valid.high + 1]
    for value in wrong:
        typed = str(value) if isinstance(value, int) else f"{value:g}"
        message = faults(group, **{flag: value})
        assert f"--{flag} {typed} must be " in message and f"; use --{flag} {valid.use}" in message
    assert float(valid.use) in valid
