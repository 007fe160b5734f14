"""The lease of a rollout server: one run at a time uses a server, because the weights and their version are its own."""

from __future__ import annotations

import hmac

from swift_megatron_grpo.generation.protocol.messages import RUN_IDLE_SECONDS, RunIdentity


class RunLease:
    """A lease that at most one run holds. `now` is in seconds of a monotonic clock.

    The status shows the name of the run. Its secret is sent by the run alone and identifies it.
    """

    def __init__(self) -> None:
        self._run: RunIdentity | None = None
        self._last_seen = 0.0

    def touch(self, run: RunIdentity | None, now: float) -> bool:
        """Record a request from `run`. Returns True if it acquires the lease, that is, no other run is active."""
        acquires = run is not None and not self.is_held_by(run) and self.holder(now) is None
        if acquires:
            self._run = run
        if self.is_held_by(run):
            self._last_seen = now
        return acquires

    def release(self, run: RunIdentity | None) -> None:
        """Release the lease if `run` holds it, so that another run can acquire it at once."""
        if self.is_held_by(run):
            self._run = None

    def is_held_by(self, run: RunIdentity | None) -> bool:
        """Return True if `run` acquired the lease last. It may have expired since, but no other run has acquired it."""
        if run is None or self._run is None:
            return False
        return run.name == self._run.name and hmac.compare_digest(run.secret.encode(), self._run.secret.encode())

    def holder(self, now: float) -> str | None:
        """Return the name of the run that holds the lease; None if that run has been idle for RUN_IDLE_SECONDS."""
        return self._run.name if self._run is not None and now - self._last_seen < RUN_IDLE_SECONDS else None
