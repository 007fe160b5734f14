"""Columns that reward functions need are known once the datasets are loaded, before a model is."""

from __future__ import annotations

import math
from typing import Any

from datasets import Dataset
from swift.rewards import ORM

from swift_megatron_grpo.arguments.environment import faults_of_columns


class Needs(ORM):  # type: ignore[misc]
    def __call__(self, completions: list[str], gold: list[str], finish_reason: list[str], hint: Any = None,
                 *, trainer_state: Any, **kwargs: Any) -> list[float]:  # fmt: skip
        return [0.0 for _ in completions]


class NeedsNothing(ORM):  # type: ignore[misc]
    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [0.0 for _ in completions]


def faults(names: list[Any], **row: Any) -> list[str]:
    return list(faults_of_columns(names, Dataset.from_list([{"messages": [{"role": "user", "content": "a"}], **row}])))


def test_a_missing_column_is_named_with_the_flag_that_maps_one() -> None:
    [fault] = faults([NeedsNothing, Needs], target="2")
    assert "needs the column gold, and the columns are messages, target; rename one, or map it: --columns" in fault
    assert fault.endswith("""--columns '{"<your column>": "gold"}'""")
    assert not faults([Needs, NeedsNothing], gold="2")
    [fault] = faults(["accuracy"], answer="2")
    assert fault.startswith("--reward_funcs accuracy needs the column solution, and")


def test_numbers_that_are_not_a_number_are_named_by_row() -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a"}], "gold": gold, "other": math.nan} for gold in (1.0, math.nan)
    ]
    [fault] = faults_of_columns([Needs], Dataset.from_list(rows))
    assert "1 of 2 rows" in fault and "row 1 has NaN in the column gold; correct these rows" in fault


def test_ms_swifts_functions_that_compare_texts_are_not_given_numbers() -> None:
    [fault] = faults(["accuracy"], solution=7)
    assert fault == '--reward_funcs accuracy compares texts, and the column solution has numbers; use texts: "7" for 7'
    assert not faults(["accuracy"], solution="7") and not faults([Needs], gold=7) and not faults(["format"], solution=7)
