"""A member of a run: the ranks of one machine, or one rollout server, on this machine or elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class State:
    """The known state of a member."""

    code: int | None = None  # its exit code, once it has ended for good
    said: str = ""  # why, if it said so
    restarts: int = 0
    is_lost: bool = False  # its machine, or what watched it there, is gone


class Member(Protocol):
    """The ranks of one machine, or one server."""

    @property
    def name(self) -> str: ...

    def place(self) -> tuple[str, int]:
        """Return the address of its machine, and a free port there."""

    def start(self, words: Sequence[str], environ: Mapping[str, str], folder: str, health: str | None) -> None:
        """Start its command, once."""

    def state(self) -> State: ...

    def stop(self) -> None:
        """Ask it to stop."""

    def kill(self) -> None:
        """End it at once, with all processes that it has started."""
