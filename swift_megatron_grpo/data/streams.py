"""Datasets that are streamed: the rows that a run trains are read at its start, and no others."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from datasets import Dataset


@dataclass(frozen=True, slots=True)
class Stream:
    """The part of each source that is read, and its order."""

    rows: int
    buffer: int | None  # rows among which the next one is drawn; None: the order of the source
    seed: int

    def first_rows(self, open_stream: Callable[..., Any], *arguments: Any, **options: Any) -> Dataset:
        """Open a source, and return its first rows as a dataset that is not streamed."""
        stream = open_stream(*arguments, **options)
        if hasattr(stream, "_hf_ds"):  # ModelScope's wrapper
            stream = stream._hf_ds
        if self.buffer is not None:
            stream = stream.shuffle(seed=self.seed, buffer_size=self.buffer)
        rows = list(islice(stream, self.rows))
        columns = dict.fromkeys(column for row in rows for column in row)  # JSON lines may leave some out
        values = {column: [row.get(column) for row in rows] for column in columns}
        return Dataset.from_dict(values, features=stream.features if rows else None)
