"""One run at a time has a server to itself: the weights are its own, and so is what their version counts."""

from __future__ import annotations

from swift_megatron_grpo.protocol.messages import RUN_IDLE_SECONDS


class RunLease:
    """`now` is in seconds, of a clock that never goes back."""

    def __init__(self) -> None:
        self._run: str | None = None
        self._heard = 0.0

    def touch(self, run: str | None, now: float) -> bool:
        """Of a run that asks. Whether it moves in: where no other is served, the first that asks is from now on."""
        moves_in = run not in (None, self._run) and self.holder(now) is None
        if moves_in:
            self._run = run
        if self.is_held_by(run):
            self._heard = now
        return moves_in

    def leave(self, run: str | None) -> None:
        if self.is_held_by(run):
            self._run = None

    def is_held_by(self, run: str | None) -> bool:
        """Also after a long silence: nobody else has moved in since."""
        return run is not None and run == self._run

    def holder(self, now: float) -> str | None:
        """The run that has moved in, and is still there."""
        return self._run if now - self._heard < RUN_IDLE_SECONDS else None
