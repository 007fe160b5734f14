"""The exchange of values between ranks, and their failures, for code that does without Megatron."""

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class RankFailure(RuntimeError):
    """Another rank failed in a step that all ranks perform together."""


class SharedFailure(RuntimeError):
    """A failure common to all ranks: every rank raises it, so all can still join in saving a checkpoint."""


class Ranks(Protocol):
    """The exchange of values between ranks; parallel.Coordinator has it."""

    rank: int
    world_size: int

    def all_gather(self, value: T) -> list[T]: ...

    def all_gather_or_raise(self, work: Callable[[], T], task: str) -> list[T]: ...
