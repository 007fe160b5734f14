"""Rows that cannot be trained on are named in an error, including those that ms-swift would silently drop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.data.checks import check_rows, no_prompt_dropped


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(path: str) -> Any:
    from swift.dataset import load_dataset

    with no_prompt_dropped():
        return load_dataset(path, load_from_cache_file=False, remove_unused_columns=False)[0]


QUESTION = {"messages": [{"role": "user", "content": "1+1"}], "solution": "2"}


def test_rows_that_ms_swift_would_drop_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"2 of 3 rows .* row 1 has no messages, row 2 has no messages \(columns: mess"
    ):
        load(write(tmp_path / "a.jsonl", QUESTION, {"solution": "3"}, {"messages": [], "solution": "4"}))
    with pytest.raises(ValueError, match=r"row 0 of the dataset has no messages, .* has the columns my_text, number"):
        load(write(tmp_path / "b.jsonl", {"my_text": "x", "number": 1}, {"my_text": "y", "number": 2}))


def test_rows_without_a_user_turn_are_named(tmp_path: Path) -> None:
    system = {"messages": [{"role": "system", "content": "be kind"}], "solution": "3"}
    dataset = load(write(tmp_path / "a.jsonl", QUESTION, system))
    with pytest.raises(ValueError, match="row 1 has no user turn, only system"):
        check_rows(dataset)
    check_rows(load(write(tmp_path / "b.jsonl", QUESTION, QUESTION)))
    check_rows(load(write(tmp_path / "c.jsonl", {"query": "1+1", "solution": "2"}, {"query": "2+2", "solution": "4"})))
    with pytest.raises(ValueError, match="teacher_prompt"):
        check_rows(
            load(write(tmp_path / "d.jsonl", QUESTION | {"teacher_prompt": "x"}, QUESTION | {"teacher_prompt": "y"}))
        )


def test_ms_swifts_preprocessor_is_restored(tmp_path: Path) -> None:
    from swift.dataset import RowPreprocessor

    before = RowPreprocessor.__call__
    with pytest.raises(ValueError):
        load(write(tmp_path / "a.jsonl", {"number": 1}))
    assert RowPreprocessor.__call__ is before
