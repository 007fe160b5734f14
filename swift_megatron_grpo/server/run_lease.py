"""The lease of a rollout server: one run at a time uses a server, because the weights and their version are its own."""

from __future__ import annotations

from swift_megatron_grpo.protocol.messages import RUN_IDLE_SECONDS


class RunLease:
    """A lease that at most one run holds. `now` is in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._run: str | None = None
        self._last_seen = 0.0

    def touch(self, run: str | None, now: float) -> bool:
        """Record a request from `run`. Returns True if it acquires the lease, that is, no other run is active."""
        acquires = run not in (None, self._run) and self.holder(now) is None
        if acquires:
            self._run = run
        if self.is_held_by(run):
            self._last_seen = now
        return acquires

    def release(self, run: str | None) -> None:
        """Release the lease if `run` holds it, so that another run can acquire it at once."""
        if self.is_held_by(run):
            self._run = None

    def is_held_by(self, run: str | None) -> bool:
        """Return True if `run` acquired the lease last. It may have expired since, but no other run has acquired it."""
        return run is not None and run == self._run

    def holder(self, now: float) -> str | None:
        """Return the run that holds the lease, or None if that run has been idle for RUN_IDLE_SECONDS."""
        return self._run if now - self._last_seen < RUN_IDLE_SECONDS else None
