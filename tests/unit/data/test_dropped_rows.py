"""Rows that ms-swift would drop are refused by number, with the cause."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.data.checks import checked_loading
from tests.unit.data.datasets import QUESTION, load, write


def test_rows_without_a_prompt_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"2 of 3 rows .* row 1 has no messages, row 2 has no messages \(columns: mess"
    ):
        load(write(tmp_path / "a.jsonl", QUESTION, {"solution": "3"}, {"messages": [], "solution": "4"}))
    with pytest.raises(ValueError, match=r"row 0 of the dataset has no messages, .* has the columns my_text, number"):
        load(write(tmp_path / "b.jsonl", {"my_text": "x", "number": 1}, {"my_text": "y", "number": 2}))


def test_rows_with_their_prompt_in_another_column_are_counted(tmp_path: Path) -> None:
    """ms-swift reads either messages or query of a dataset, and once trained on half of this one."""
    query = {"query": "1+1", "solution": "2"}
    with pytest.raises(
        ValueError, match=r"4 of 8 rows .* row 4 has query but no messages, the only column that is rea"
    ):
        load(write(tmp_path / "a.jsonl", *[QUESTION] * 4, *[query] * 4))
    assert len(load(write(tmp_path / "b.jsonl", *[query] * 4))) == 4


@pytest.mark.parametrize(
    ("messages", "cause"),
    [
        ("hello", "has messages that are str, not a list of objects with role and content"),
        ({"role": "user", "content": "x"}, "has messages that are dict, not a list"),
        (["a", "b"], "has messages that are a list of str, not a list"),
        ([{"content": "x"}], "has messages without a role"),
        ([{"role": "user", "content": None}], "has messages without content"),
        ([{"role": "teacher", "content": "x"}], "has wrong messages (AssertionError: message: {'role': 'teacher'"),
    ],
)
def test_the_cause_is_what_is_wrong_with_the_messages(tmp_path: Path, messages: Any, cause: str) -> None:
    with pytest.raises(ValueError) as caught:
        load(write(tmp_path / "a.jsonl", {"messages": messages, "solution": "2"}))
    assert f"1 of 1 rows of the dataset would not be trained: row 0 {cause}" in str(caught.value)
    assert str(caught.value).endswith("(columns: messages, solution); correct these rows, or remove them")


def test_rows_that_a_preprocessor_of_one_dataset_filters_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    from datasets import Dataset
    from swift.dataset import RowPreprocessor

    class OnlyEven(RowPreprocessor):  # type: ignore[misc]
        def preprocess(self, row: dict[str, Any]) -> dict[str, Any] | None:
            return row if row["number"] % 2 == 0 else None

    rows = [{"messages": QUESTION["messages"], "number": number} for number in range(6)]
    with checked_loading(), caplog.at_level(logging.WARNING):
        assert len(OnlyEven()(Dataset.from_list(rows), load_from_cache_file=False)) == 3
    assert "OnlyEven keeps 3 of 6 rows of the dataset; the others are not trained" in caplog.text


def test_ms_swifts_preprocessor_is_restored(tmp_path: Path) -> None:
    from swift.dataset import RowPreprocessor

    before = RowPreprocessor.__call__
    with pytest.raises(ValueError):
        load(write(tmp_path / "a.jsonl", {"number": 1}))
    assert RowPreprocessor.__call__ is before
