"""Datasets that cannot be trained on, found before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from swift.dataset import RowPreprocessor

# Columns in which ms-swift's preprocessors find a prompt.
_PROMPT_COLUMNS = frozenset(
    ("messages", "conversation", "conversations", "query", "prompt", "input", "instruction", "question", "problem")
)
_TEACHER_COLUMNS = ("teacher_prompt", "teacher_images")
_SHOWN = 5


def check_rows(dataset: Any) -> None:
    """ValueError unless every row of this dataset, as ms-swift has preprocessed it, holds a user's turn to answer."""
    columns = list(dataset.column_names)
    if len(dataset) == 0:
        raise ValueError(f"the dataset has no rows (columns: {_listed(columns)}); is --dataset what you meant?")
    if "messages" not in columns:
        raise ValueError(_nothing_to_read(len(dataset), columns))
    teachers = [column for column in _TEACHER_COLUMNS if column in columns]
    if teachers:
        raise ValueError(
            f"the dataset has the column {teachers[0]}: distillation from a teacher is not part of this "
            "trainer yet; remove the column"
        )
    messages = (row["messages"] for row in dataset.select_columns("messages"))
    _refuse([(row, problem) for row, problem in enumerate(map(_problem, messages)) if problem], len(dataset), columns)


@contextmanager
def no_prompt_dropped() -> Iterator[None]:
    """Inside, a row without a prompt is an error. ms-swift's preprocessors by themselves leave such rows out."""
    preprocess = RowPreprocessor.__call__

    def preprocess_all(self: Any, dataset: Any, **options: Any) -> Any:
        kept = preprocess(self, dataset, **options)
        _check_nothing_lost(dataset, kept)
        return kept

    RowPreprocessor.__call__ = preprocess_all
    try:
        yield
    finally:
        RowPreprocessor.__call__ = preprocess


def _check_nothing_lost(raw: Any, kept: Any) -> None:
    if len(kept) >= len(raw):
        return
    columns = list(raw.column_names)
    if len(kept) == 0:
        raise ValueError(_nothing_to_read(len(raw), columns))
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


def _refuse(wrong: list[tuple[int, str]], size: int, columns: Iterable[str]) -> None:
    if wrong:
        rows = ", ".join(f"row {row} {problem}" for row, problem in wrong[:_SHOWN])
        more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ValueError(
            f"{len(wrong)} of {size} rows of the dataset hold nothing to answer: {rows}{more} "
            f"(columns: {_listed(columns)}); remove these rows"
        )


def _nothing_to_read(size: int, columns: Iterable[str]) -> str:
    return (
        f"row 0 of the dataset has no messages, nor has any other of its {size} rows: it has the columns "
        f"{_listed(columns)}; rename the one with the prompt, or say which it is: "
        '--columns \'{"<your column>": "query"}\''
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names)) or "none"
