"""Refuse datasets that cannot be trained on, before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from swift_megatron_grpo.data.dropped_rows import no_prompt_column, refuse_rows

_TEACHER_COLUMNS = ("teacher_prompt", "teacher_images")
_MEDIA_COLUMNS = {"images": "images", "videos": "videos", "audios": "audio"}  # of ms-swift's preprocessed rows


def check_rows(dataset: Any, takes_images: bool) -> None:
    """Raise ValueError unless every row of this preprocessed dataset has a user turn to respond to.

    `takes_images`: the model has an image part. Other media, and images without it, are refused.
    """
    columns = list(dataset.column_names)
    if len(dataset) == 0:
        raise ValueError(f"the dataset has no rows (columns: {_listed(columns)}); check --dataset")
    if "messages" not in columns:
        raise ValueError(no_prompt_column(len(dataset), columns))
    teachers = [column for column in _TEACHER_COLUMNS if column in columns]
    if teachers:
        raise ValueError(
            f"the dataset has the column {teachers[0]}: this trainer does not support distillation from a teacher yet; "
            "remove the column"
        )
    messages = (row["messages"] for row in dataset.select_columns("messages"))
    problems = [(row, problem) for row, problem in enumerate(map(_problem, messages)) if problem]
    advice = f" (columns: {_listed(columns)}); remove these rows"
    if len(problems) == len(dataset):
        advice += """, or map the column with the prompt: --columns '{"<your column>": "query"}'"""
    refuse_rows(problems, len(dataset), "have no prompt to respond to", advice)
    _check_media(dataset, [column for column in columns if column != "images" or not takes_images])


def _check_media(dataset: Any, columns: Iterable[str]) -> None:
    """Refuse rows with media in these columns, by row and column."""
    columns = [column for column in columns if column in _MEDIA_COLUMNS]
    if not columns:
        return
    problems = [
        (row, f"has {len(values[column])} in the column {column}")
        for row, values in enumerate(dataset.select_columns(columns))
        for column in columns
        if values[column]
    ]
    kinds = " and ".join(_MEDIA_COLUMNS[column] for column in columns)
    refuse_rows(
        problems,
        len(dataset),
        f"have media, and {kinds} cannot be trained with this model",
        "; remove these rows, or remove the column to train on their text alone",
    )


def _problem(messages: list[dict[str, Any]] | None) -> str | None:
    if not messages:
        return "has no messages"
    if all(message["role"] != "user" for message in messages):
        return f"has no user turn, only {_listed(message['role'] for message in messages)}"
    return None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names)) or "none"
