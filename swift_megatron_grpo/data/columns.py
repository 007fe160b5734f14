"""Columns that ms-swift's preprocessors do not read as they are: a field of a dictionary, and messages in `prompt`.

Rows of verl have both: `prompt` is a list of messages, and `reward_model` a dictionary with the `ground_truth`. TRL has
the first. ms-swift takes such a prompt for the text of one message, which fails at the first generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift.dataset import MessagesPreprocessor, ResponsePreprocessor

# Columns that ms-swift reads as a conversation, and those that it reads as the text of one message.
CONVERSATIONS = frozenset(name for name, read in MessagesPreprocessor().columns.items() if read == "messages")
TEXTS = frozenset(name for name, read in ResponsePreprocessor().columns.items() if read == "query")


def column_of_messages(dataset: Any) -> str | None:
    """Return the one column that holds lists of messages under another name than ms-swift's."""
    columns = {column.lower(): column for column in dataset.column_names}
    if len(dataset) == 0 or not columns.keys().isdisjoint(CONVERSATIONS):
        return None
    row = dataset[0]
    found = [column for name, column in columns.items() if name in TEXTS and _are_messages(row[column])]
    return found[0] if len(found) == 1 else None


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def with_fields(dataset: Any, columns: Mapping[str, str]) -> Any:
    """Add a column for each field that --columns names with dots, as {"column.field": "name"}; ms-swift renames it."""
    for path, name in columns.items():
        column, *fields = path.split(".")
        if not fields or path in dataset.column_names or column not in dataset.column_names:
            continue
        values = [_field(row, fields) for row in dataset[column]]
        if all(value is None for value in values):
            raise ValueError(f"--columns: no row of the dataset has {path}; its first {column} is {dataset[0][column]}")
        dataset = dataset.remove_columns([name] if name in dataset.column_names else []).add_column(path, values)
    return dataset


def _field(value: Any, fields: list[str]) -> Any:
    for field in fields:
        value = value.get(field) if isinstance(value, dict) else None
    return value
