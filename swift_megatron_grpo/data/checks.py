"""Refuse datasets that cannot be trained on, before a model is loaded.

ms-swift's preprocessors drop rows: they log the first ten faults, and the others would be trained.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from swift.dataset import MessagesPreprocessor, ResponsePreprocessor, RowPreprocessor

from swift_megatron_grpo.runtime.replaced import replaced

logger = logging.getLogger(__name__)

_TEACHER_COLUMNS = ("teacher_prompt", "teacher_images")
_MEDIA_COLUMNS = {"images": "images", "videos": "videos", "audios": "audio"}  # of ms-swift's preprocessed rows
# Columns from which ms-swift's preprocessors read a prompt.
_MESSAGE_COLUMNS = ("messages", "conversation", "conversations")
_PROMPT_COLUMNS = frozenset((*_MESSAGE_COLUMNS, "query", "prompt", "input", "instruction", "question", "problem"))
_SHOWN = 5  # rows that an error names


def refuse_rows(problems: Sequence[tuple[int, str]], size: int, fault: str, advice: str) -> None:
    """Raise ValueError if there are problems: pairs of a row's index and its fault. `advice` follows them directly."""
    if problems:
        rows = ", ".join(f"row {row} {problem}" for row, problem in problems[:_SHOWN])
        more = f", and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(f"{len(problems)} of {size} rows of the dataset {fault}: {rows}{more}{advice}")


def no_prompt_column(size: int, columns: Sequence[str]) -> str:
    return (
        f"row 0 of the dataset has no messages, and neither has any other of its {size} rows: it has the columns "
        f"{', '.join(columns) or 'none'}; rename the column with the prompt to query, or map it: "
        '--columns \'{"<your column>": "query"}\''
    )


def check_rows(dataset: Any, takes_images: bool) -> None:
    """Raise ValueError unless every row has a user turn to respond to, and no media that the model does not take."""
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
    refused = [column for column in columns if column in _MEDIA_COLUMNS and not (column == "images" and takes_images)]
    rows = dataset.select_columns(refused) if refused else ()
    problems = [
        (row, f"has {len(values[column])} in the column {column}")
        for row, values in enumerate(rows)
        for column in refused
        if values[column]
    ]
    kinds = " and ".join(_MEDIA_COLUMNS[column] for column in refused)
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


# ---- rows that ms-swift drops


@contextmanager
def no_prompt_dropped() -> Iterator[None]:
    """Raise ValueError for rows that a preprocessor of ms-swift drops, with the cause.

    A preprocessor that was written for one dataset may filter its rows on purpose: it is only logged how many.
    """
    preprocess = RowPreprocessor.__call__

    def preprocess_all(self: Any, dataset: Any, **options: Any) -> Any:
        kept = preprocess(self, dataset, **options)
        if len(kept) < len(dataset) and self.dataset_sample is None:
            _check_dropped(self, dataset, len(kept), bool(options.get("enable_auto_mapping")))
        return kept

    with replaced(RowPreprocessor, "__call__", preprocess_all):
        yield


def _check_dropped(preprocessor: Any, raw: Any, kept: int, auto_mapping: bool) -> None:
    columns = list(raw.column_names)
    prompts = [column for column in columns if column.lower() in _PROMPT_COLUMNS]
    if kept == 0 and not prompts:
        raise ValueError(no_prompt_column(len(raw), columns))
    if not isinstance(preprocessor, MessagesPreprocessor | ResponsePreprocessor):
        logger.warning(
            f"{type(preprocessor).__name__} keeps {kept} of {len(raw)} rows of the dataset; the others are not trained"
        )
        return
    logging.disable(logging.WARNING)  # ms-swift's advice for every row
    try:
        dropped = [(row, _cause(raw[row], prompts, error)) for row, error in _dropped(preprocessor, raw, auto_mapping)]
    finally:
        logging.disable(logging.NOTSET)
    advice = f" (columns: {', '.join(columns)}); correct these rows, or remove them"
    refuse_rows(dropped, len(raw), "would not be trained", advice)


def _dropped(preprocessor: Any, raw: Any, auto_mapping: bool) -> Iterator[tuple[int, Exception | None]]:
    """Preprocess the rows again, one at a time, and yield those that are dropped, each with its error."""
    dataset = preprocessor.safe_rename_columns(raw, preprocessor.origin_columns)
    if auto_mapping:
        dataset = preprocessor.safe_rename_columns(dataset, preprocessor.columns)
    for index, row in enumerate(preprocessor.prepare_dataset(dataset)):
        batch = {column: [value] for column, value in row.items()}
        try:
            result = preprocessor.batched_preprocess(batch, strict=True, ignore_max_length_error=False)
        except Exception as error:  # whatever the row's content raises in ms-swift
            yield index, error
        else:
            if not result["messages"]:
                yield index, None


def _cause(row: dict[str, Any], prompts: Sequence[str], error: Exception | None) -> str:
    """Return why ms-swift drops the row."""
    column = next((column for column in prompts if column.lower() in _MESSAGE_COLUMNS), None)
    if column is None:
        if not any(row[prompt] for prompt in prompts):
            return f"has no {', '.join(prompts)}"
        return f"raises {type(error).__name__}: {error}"
    messages = row[column]
    if not messages:
        others = [prompt for prompt in prompts if row[prompt]]
        return f"has {others[0]} but no {column}, the only column that is read" if others else f"has no {column}"
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        kind = f"a list of {type(messages[0]).__name__}" if isinstance(messages, list) else type(messages).__name__
        return f"has {column} that are {kind}, not a list of objects with role and content"
    roles = any(message.get("role") or message.get("from") for message in messages)
    contents = any(message.get("content") or message.get("value") for message in messages)
    if roles != contents:
        return f"has {column} without {'content' if roles else 'a role'}"
    return f"has wrong {column} ({type(error).__name__}: {error})"
