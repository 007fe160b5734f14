"""Requests lost with a server, until all of them are completed again, and how long that took. No clock, no socket."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True)
class _Loss:
    """The requests that one server was processing when it was lost."""

    server: str
    at: float  # seconds
    requests: int
    missing: set[int]


class LostRequests:
    """The losses that are not fully recovered yet."""

    def __init__(self) -> None:
        self._losses: list[_Loss] = []

    def record_loss(self, server: str, requests: Collection[int], now: float) -> None:
        """Record requests that will be retried; some may have been lost before."""
        if requests:
            self._losses.append(_Loss(server, now, len(requests), set(requests)))

    def record_completion(self, request: int, now: float) -> list[str]:
        """Record a completed request. Return a log message for each loss that it was the last to recover."""
        for loss in self._losses:
            loss.missing.discard(request)
        recovered = [loss for loss in self._losses if not loss.missing]
        self._losses = [loss for loss in self._losses if loss.missing]
        return [
            f"all completions lost with {loss.server} are recovered: {loss.requests} were regenerated, "
            f"{now - loss.at:.1f} s after it was lost"
            for loss in recovered
        ]
