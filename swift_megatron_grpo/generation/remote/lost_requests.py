"""What lost servers were answering, until all of it is there again, and what that cost. No clock and no socket here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True)
class _Loss:
    server: str
    at: float  # seconds
    requests: int
    missing: set[int]


class LostRequests:
    def __init__(self) -> None:
        self._losses: list[_Loss] = []

    def lost(self, server: str, requests: Collection[int], now: float) -> None:
        """These requests are asked again; some perhaps not for the first time."""
        if requests:
            self._losses.append(_Loss(server, now, len(requests), set(requests)))

    def finished(self, request: int, now: float) -> list[str]:
        """The losses that this answer was the last to make good, in words."""
        for loss in self._losses:
            loss.missing.discard(request)
        good = [loss for loss in self._losses if not loss.missing]
        self._losses = [loss for loss in self._losses if loss.missing]
        return [
            f"every completion that {loss.server} had not finished is there again: {loss.requests} generated anew, "
            f"{now - loss.at:.1f} s after it was lost"
            for loss in good
        ]
