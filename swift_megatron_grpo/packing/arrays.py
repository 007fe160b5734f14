"""Things of equal number that are picked from, and joined, together: arrays, and objects that are made when read."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import chain
from typing import Any, Self, TypeVar, overload

import numpy as np

from swift_megatron_grpo.packing.bins import Bools, Ints

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Columns:
    """The base of dataclasses whose every field has a value of each thing at its place: an array, objects, Columns."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def pick(self, places: Ints | Bools) -> Self:
        return type(self)(*(pick(getattr(self, field.name), places) for field in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return cls(*(joined([getattr(part, field.name) for part in parts]) for field in fields(cls)))


class Outlined(Sequence[T]):
    """Objects, each of which is made when it is first read, and kept."""

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self._length, self._made = length, cache(make)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> Self: ...
    def __getitem__(self, place: int | slice) -> T | Self:
        places = range(self._length)[place]
        return self.pick(np.array(places, np.int64)) if isinstance(places, range) else self._made(places)

    @abstractmethod
    def pick(self, places: Ints) -> Self:
        """Return some of these objects."""


def pick(values: Any, places: Any) -> Any:
    """Return the values at these places, which are integers; those of arrays may also be picked by flags."""
    if isinstance(values, np.ndarray):
        return values[places]
    return values.pick(places) if isinstance(values, Columns | Outlined) else [values[i] for i in places.tolist()]


def joined(parts: Sequence[Any]) -> Any:
    """Return the values of all parts, as a list if these are not of one kind."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    filled = [part for part in parts if len(part)] or parts[:1]
    if len(filled) == 1:
        return filled[0]
    first, *others = {type(part) for part in filled}
    return first.joined(filled) if not others and hasattr(first, "joined") else [*chain(*filled)]
