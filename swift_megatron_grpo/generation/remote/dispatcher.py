"""Who answers which request: the decisions alone, without a clock, a socket or a thread.

Requests are numbers. They go out in order, each to the server with the largest share of its slots free, so a server
that is quicker gets more of them. What a lost server was answering waits in front of everything else. What a server
refused goes to another one, if there is one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

_NOBODY: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class Assignment:
    request: int
    server: str


class Dispatcher:
    def __init__(self, requests: int) -> None:
        self._waiting = list(range(requests - 1, -1, -1))  # the next one is the last
        self._running: dict[str, set[int]] = {}  # by server; those that may answer are its keys
        self._slots: dict[str, int] = {}
        self._refusals: dict[int, list[str]] = {}  # by request, the servers
        self.unfinished = requests

    @property
    def waits(self) -> bool:
        """Whether there are requests that nobody answers yet."""
        return bool(self._waiting)

    @property
    def servers(self) -> set[str]:
        return set(self._slots)

    def admit(self, server: str, slots: int) -> None:
        """It is alive and has the right weights."""
        self._slots[server] = slots
        self._running.setdefault(server, set())

    def lose(self, server: str) -> set[int]:
        """It is gone, or must not answer any more. Returns what it was answering, which is asked again."""
        self._slots.pop(server, None)
        lost = self._running.pop(server, set())
        self._waiting.extend(sorted(lost, reverse=True))
        return lost

    def assign(self, of_others: Mapping[str, int] = _NOBODY) -> list[Assignment]:
        """As many as there are free slots for. `of_others`: slots that other generations take, by server."""
        assigned, kept = [], []
        while self._waiting and self._freest(self.servers, of_others) is not None:
            request = self._waiting.pop()
            willing = self.servers.difference(self._refusals.get(request, ())) or self.servers
            server = self._freest(willing, of_others)
            if server is None:  # those that have not refused it are busy
                kept.append(request)
                continue
            self._running[server].add(request)
            assigned.append(Assignment(request, server))
        self._waiting.extend(reversed(kept))
        return assigned

    def finish(self, request: int, server: str) -> bool:
        """False: the answer is of a server that was lost in the meantime, and is not wanted any more."""
        if request not in self._running.get(server, ()):
            return False
        self._running[server].remove(request)
        self.unfinished -= 1
        return True

    def refuse(self, request: int, server: str) -> int:
        """The server is well and could not answer this one. Asked again after all others; how often it was refused."""
        refusals = self._refusals.setdefault(request, [])
        if request in self._running.get(server, ()):
            self._running[server].remove(request)
            self._waiting.insert(0, request)
            refusals.append(server)
        return len(refusals)

    def _freest(self, servers: Collection[str], of_others: Mapping[str, int]) -> str | None:
        free = {
            server: 1 - (len(self._running[server]) + of_others.get(server, 0)) / self._slots[server]
            for server in servers
        }
        best = max(sorted(free), key=lambda server: free[server], default=None)
        return best if best is not None and free[best] > 0 else None
