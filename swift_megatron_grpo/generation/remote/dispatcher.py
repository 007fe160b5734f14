"""Assignment of requests to servers: the decisions alone, without a clock, a socket or a thread.

Requests are numbers. They are assigned in order, each to the server with the largest share of free slots, so faster
servers get more of them. The requests of a lost server are retried before everything else. A request that a server
refused is retried last, on another server if there is one.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

_NO_SLOTS: Mapping[str, int] = {}


class Assignment(NamedTuple):
    request: int
    server: str


class Dispatcher:
    """The state of every request of one generation: waiting, running on a server, or finished."""

    def __init__(self, requests: int) -> None:
        self._waiting = list(range(requests - 1, -1, -1))  # the next one is the last
        self.running: dict[str, set[int]] = {}  # requests, by admitted server
        self._slots: dict[str, int] = {}
        self._refusals: dict[int, list[str]] = {}  # servers that refused it, by request
        self.unfinished = requests

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def servers(self) -> set[str]:
        return set(self._slots)

    def admit(self, server: str, slots: int) -> None:
        """Add a server that is alive and has the right weights."""
        self._slots[server] = slots
        self.running.setdefault(server, set())

    def mark_lost(self, server: str) -> set[int]:
        """Remove a server. Return the requests that were running on it, which will be assigned again first."""
        self._slots.pop(server, None)
        lost = self.running.pop(server, set())
        self._waiting.extend(sorted(lost, reverse=True))
        return lost

    def assign(self, used_by_others: Mapping[str, int] = _NO_SLOTS) -> list[Assignment]:
        """Assign requests to all free slots. `used_by_others`: slots taken by other generations, by server."""
        assigned, kept = [], []
        while self._waiting and self._freest(self.servers, used_by_others) is not None:
            request = self._waiting.pop()
            candidates = self.servers.difference(self._refusals.get(request, ())) or self.servers
            server = self._freest(candidates, used_by_others)
            if server is None:  # every server that has not refused it is busy
                kept.append(request)
                continue
            self.running[server].add(request)
            assigned.append(Assignment(request, server))
        self._waiting.extend(reversed(kept))
        return assigned

    def finish(self, request: int, server: str) -> bool:
        """Mark a request as finished. Return False if the server was lost in the meantime: discard its completion."""
        if request not in self.running.get(server, ()):
            return False
        self.running[server].remove(request)
        self.unfinished -= 1
        return True

    def refuse(self, request: int, server: str) -> int:
        """Queue a request behind all others after a healthy server refused it. Return how often it was refused."""
        refusals = self._refusals.setdefault(request, [])
        if request in self.running.get(server, ()):
            self.running[server].remove(request)
            self._waiting.insert(0, request)
            refusals.append(server)
        return len(refusals)

    def _freest(self, servers: Collection[str], used_by_others: Mapping[str, int]) -> str | None:
        """Return the server with the largest share of free slots, or None if all are busy."""
        free = {
            server: 1 - (len(self.running[server]) + used_by_others.get(server, 0)) / self._slots[server]
            for server in servers
        }
        best = max(sorted(free), key=lambda server: free[server], default=None)
        return best if best is not None and free[best] > 0 else None


class _Loss(NamedTuple):
    server: str
    at: float  # seconds
    requests: int  # that it was processing
    missing: set[int]  # those of them that have not been completed again


class LostRequests:
    """Requests lost with a server, until all of them are completed again, and how long that took."""

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
