"""Arrays of equal length that are picked from, and joined, together."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from swift_megatron_grpo.packing.bins import Bools, Ints


@dataclass(frozen=True, slots=True)
class Columns:
    """The base of dataclasses whose every field is an array, or Columns, with a value of each thing at its place."""

    def pick(self, places: Ints | Bools | slice) -> Self:
        return type(self)(*(_picked(getattr(self, field.name), places) for field in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return cls(*(_joined([getattr(part, field.name) for part in parts]) for field in fields(cls)))


def _picked(column: Any, places: Ints | Bools | slice) -> Any:
    return column.pick(places) if isinstance(column, Columns) else column[places]


def _joined(parts: Sequence[Any]) -> Any:
    return type(parts[0]).joined(parts) if isinstance(parts[0], Columns) else np.concatenate(parts)
