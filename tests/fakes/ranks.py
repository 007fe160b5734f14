"""The exchange of values between ranks, with one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class OneRank:
    """The Coordinator of a single rank."""

    rank, world_size = 0, 1

    def all_gather(self, value: T) -> list[T]:
        return [value]

    def all_gather_or_raise(self, work: Callable[[], T], task: str) -> list[T]:
        return [work()]

    def max(self, value: int) -> int:
        return value

    def gather_samples(self, values: dict[int, T], position: Any) -> dict[int, T]:
        return values
