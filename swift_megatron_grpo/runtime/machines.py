"""The machines of a run: their torchruns tell each other that they live, over the store of the rendezvous.

A lost machine has to be found outside of the collectives, which wait in silence for one whose link is cut. What torch
has does not find it (tests/contract/test_torch_store.py): the static rendezvous, which ms-swift selects, has no
keep-alives. Those of `--rdzv_backend c10d` compare the clocks of machines, and a torchrun reads them only to join. So a
thread of torchrun writes a new value into the store every two seconds and reads those of the other machines. Times are
of the own clock alone.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

BEAT_SECONDS = 2.0
_GREETING_SECONDS = 0.2  # between two values until all machines are known by name
SILENT_SECONDS = 30.0  # until a line names a machine that does not answer
GONE_SECONDS = 4 * BEAT_SECONDS  # of silence, that explain a connection which broke at the same time
_ANSWER_SECONDS = 10.0  # for the store; a request that takes longer is left behind, because it cannot be cancelled
_SHOWN = 200  # characters of what another machine has written

Store = Any  # dist.Store


def connected(address: str, port: int) -> Store:
    """Return a connection of its own to the store; raises OSError or a RuntimeError of torch if it does not answer."""
    from torch import distributed as dist  # not at the top, because torch is being imported when this is

    # without the warnings that torch prints while it tries again
    socket.create_connection((address, port), _ANSWER_SECONDS).close()
    limit = timedelta(seconds=_ANSWER_SECONDS)
    store = dist.TCPStore(address, port, None, False, limit, wait_for_workers=False)
    return dist.PrefixStore("swift_megatron_grpo/machines", store)


@dataclass(slots=True)
class _Machine:
    name: str
    heard: float  # when its value last changed, by this machine's clock
    value: bytes = b""
    ended: str | None = None  # why; empty: its ranks have done their work or have stopped at a signal
    is_named: bool = False  # a line has named it, because it does not answer

    def hear(self, value: bytes, now: float) -> None:
        if value == self.value:
            return
        self.value, self.heard = value, now
        try:
            said = json.loads(value)
            name, ended = said["name"], said["ended"]
        except (ValueError, KeyError, TypeError):  # not of this package: it answers, and says nothing
            return
        self.name = _printable(name)
        self.ended = None if ended is None else _printable(ended)


class Machines:
    """The other machines, as this one's torchrun sees them. `look` has to be called often, by one thread."""

    def __init__(self, number: int, count: int, ranks: str, connect: Callable[[], Store]) -> None:
        """Begin to tell the others. `number`: of this machine; `connect` returns a new connection to the store.

        Machine 0 has the store.
        """
        self._number, self._connect = number, connect
        self._name = f"machine {number} ({socket.gethostname()}, {ranks})"
        now = time.monotonic()
        self._others = {other: _Machine(f"machine {other}", now) for other in range(count) if other != number}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._beat = 0
        self._ended: str | None = None
        self._told = threading.Event()  # the store has `_ended`
        self._answered = self._looked = self._began = now
        self._talker: threading.Thread | None = None
        self.look()

    def look(self) -> None:
        """Keep the thread going that talks to the store."""
        now = time.monotonic()
        with self._lock:
            if now - self._looked > _ANSWER_SECONDS:  # this process was stopped, and has heard nothing
                self._forget(now)
            self._looked = now
            lives = self._talker is not None and self._talker.is_alive()
            if now - self._began > (_ANSWER_SECONDS if lives else BEAT_SECONDS) or self._talker is None:
                self._began = now
                self._talker = threading.Thread(target=self._talk, name="machines", daemon=True)
                self._talker.start()

    def news(self, end_after: float) -> Iterator[str]:
        """Yield a line for each machine that has become silent, or answers again. `end_after`: 0 for no limit."""
        now = time.monotonic()
        limit = min(SILENT_SECONDS, end_after / 2) if end_after else SILENT_SECONDS
        with self._lock:
            silent = dict(self._silent(limit, now))
            for machine in self._others.values():
                if machine.name in silent and not machine.is_named:
                    machine.is_named = True
                    then = f"; the run ends after {end_after:g} s (--node_timeout)" if end_after else ""
                    yield f"{machine.name} has not answered for {limit:g} s{then}"
                elif machine.is_named and machine.name not in silent:
                    machine.is_named = False
                    yield f"{machine.name} answers again"

    def lost(self, seconds: float) -> str | None:
        """Return which machine has not answered for so many seconds, the most silent one; None: all have."""
        with self._lock:
            silent = sorted(self._silent(seconds, time.monotonic()), key=lambda of_machine: -of_machine[1])
        return f"{silent[0][0]} is lost: it has not answered for {silent[0][1]:.0f} s" if silent else None

    def ended(self) -> str | None:
        """Return which other machine has ended the run, and why; None: none has."""
        with self._lock:
            failed = [other for other in self._others.values() if other.ended]
        return f"{failed[0].name} has ended: {failed[0].ended}" if failed else None

    def end(self, reason: str = "") -> None:
        """Tell the others that this machine ends, and why; without a reason, its ranks have not failed.

        Waits until the store has it, and where the store ends with this process, until the others have read it.
        """
        self._ended = reason
        self._wake.set()
        if self._told.wait(2 * BEAT_SECONDS) and reason and self._number == 0:
            time.sleep(2 * BEAT_SECONDS)

    def _silent(self, seconds: float, now: float) -> Iterator[tuple[str, float]]:
        """Yield each machine that is silent for so long, and for how long; if the store is, only the one that has it.

        What the others do is not known then.
        """
        if self._number != 0 and now - self._answered > _ANSWER_SECONDS:
            since, store = now - self._answered, self._others[0]
            if since > seconds and store.ended is None:
                yield store.name, since
            return
        for other in self._others.values():
            if now - other.heard > seconds and other.ended is None:
                yield other.name, now - other.heard

    def _forget(self, now: float) -> None:
        """Begin to count silence now."""
        self._answered = now
        for other in self._others.values():
            other.heard = now

    # ---- in the thread

    def _talk(self) -> None:
        try:
            store = self._connect()
            while self._exchange(store):
                known = all(other.value for other in self._others.values())
                self._wake.wait(BEAT_SECONDS if known else _GREETING_SECONDS)
                self._wake.clear()
        except (OSError, RuntimeError):  # the store has ended or is out of reach: `look` tries again
            return

    def _exchange(self, store: Store) -> bool:
        """Write this machine's value and read those of the others; return False if there is no more to tell."""
        with self._lock:
            if self._talker is not threading.current_thread():
                return False
            self._began = time.monotonic()
            self._beat += 1
            ended = self._ended
            value = json.dumps({"name": self._name, "beat": self._beat, "ended": ended})
            known = [other for other, machine in self._others.items() if machine.value]
        store.set(str(self._number), value)
        # a read of what is not there would wait for it
        present = known + [other for other in self._others if other not in known and store.check([str(other)])]
        values = store.multi_get([str(other) for other in present]) if present else []
        now = time.monotonic()
        with self._lock:
            if self._talker is not threading.current_thread():
                return False
            if now - self._answered > _ANSWER_SECONDS:
                self._forget(now)
            self._answered = now
            for other, heard in zip(present, values, strict=True):
                self._others[other].hear(heard, now)
        if ended is not None:
            self._told.set()
        return ended is None


def _printable(text: object) -> str:
    return "".join(character if character.isprintable() else "?" for character in str(text)[:_SHOWN])
