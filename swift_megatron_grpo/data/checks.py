"""Refuse datasets that cannot be trained on, before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from swift.dataset import RowPreprocessor

# Columns from which ms-swift's preprocessors read a prompt.
_PROMPT_COLUMNS = frozenset(
    ("messages", "conversation", "conversations", "query", "prompt", "input", "instruction", "question", "problem")
)
_TEACHER_COLUMNS = ("teacher_prompt", "teacher_images")
_SHOWN = 5  # rows that an error names


def check_rows(dataset: Any) -> None:
    """Raise ValueError unless every row of this preprocessed dataset contains a user turn to respond to."""
    columns = list(dataset.column_names)
    if len(dataset) == 0:
        raise ValueError(f"the dataset has no rows (columns: {_listed(columns)}); check --dataset")
    if "messages" not in columns:
        raise ValueError(_no_prompt_column(len(dataset), columns))
    teachers = [column for column in _TEACHER_COLUMNS if column in columns]
    if teachers:
        raise ValueError(
            f"the dataset has the column {teachers[0]}: this trainer does not support distillation from a teacher yet; "
            "remove the column"
        )
    messages = (row["messages"] for row in dataset.select_columns("messages"))
    _refuse([(row, problem) for row, problem in enumerate(map(_problem, messages)) if problem], len(dataset), columns)


@contextmanager
def no_prompt_dropped() -> Iterator[None]:
    """Raise ValueError for rows without a prompt, which ms-swift's preprocessors would otherwise drop silently."""
    preprocess = RowPreprocessor.__call__

    def preprocess_all(self: Any, dataset: Any, **options: Any) -> Any:
        kept = preprocess(self, dataset, **options)
        _check_no_row_dropped(dataset, kept)
        return kept

    RowPreprocessor.__call__ = preprocess_all
    try:
        yield
    finally:
        RowPreprocessor.__call__ = preprocess


def _check_no_row_dropped(raw: Any, kept: Any) -> None:
    if len(kept) >= len(raw):
        return
    columns = list(raw.column_names)
    if len(kept) == 0:
        raise ValueError(_no_prompt_column(len(raw), columns))
    readable = [column for column in columns if column.lower() in _PROMPT_COLUMNS]
    if readable:
        rows = enumerate(raw.select_columns(readable))
        _refuse([(i, f"has no {_listed(readable)}") for i, row in rows if not any(row.values())], len(raw), columns)


def _problem(messages: list[dict[str, Any]] | None) -> str | None:
    if not messages:
        return "has no messages"
    if all(message["role"] != "user" for message in messages):
        return f"has no user turn, only {_listed(message['role'] for message in messages)}"
    return None


def _refuse(problems: list[tuple[int, str]], size: int, columns: Iterable[str]) -> None:
    """Raise ValueError if there are problems: pairs of a row's index and what is wrong with it."""
    if problems:
        rows = ", ".join(f"row {row} {problem}" for row, problem in problems[:_SHOWN])
        more = f", and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(
            f"{len(problems)} of {size} rows of the dataset have no prompt to respond to: {rows}{more} "
            f"(columns: {_listed(columns)}); remove these rows"
        )


def _no_prompt_column(size: int, columns: Iterable[str]) -> str:
    return (
        f"row 0 of the dataset has no messages, and neither has any other of its {size} rows: it has the columns "
        f"{_listed(columns)}; rename the column with the prompt to query, or map it: "
        '--columns \'{"<your column>": "query"}\''
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names)) or "none"
