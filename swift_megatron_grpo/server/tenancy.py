"""One run at a time has a server to itself: the weights are its own, and so is what their version counts."""

from __future__ import annotations

_SILENT = 10.0  # seconds after which a run counts as ended; a trainer asks for the status every second


class Tenancy:
    """`now` is in seconds, of a clock that never goes back."""

    def __init__(self) -> None:
        self._run: str | None = None
        self._heard = 0.0

    def admit(self, run: str, now: float) -> None:
        self._run, self._heard = run, now

    def hear(self, run: str | None, now: float) -> None:
        if self.belongs_to(run):
            self._heard = now

    def belongs_to(self, run: str | None) -> bool:
        """Also after a long silence: nobody else has joined since."""
        return run is not None and run == self._run

    def served(self, now: float) -> str | None:
        """The run that has joined, and is still there."""
        return self._run if now - self._heard < _SILENT else None
