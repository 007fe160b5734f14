"""A small process beside each rank. Past a deadline it writes down what the rank is doing, and ends it.

A process, because it has to work when the rank cannot: in a collective, or in C code that holds the interpreter's lock.
It is run as a script, by its path, and imports the standard library only.

    python monitor.py RANK WORLD_SIZE REPORT STACKS ASK ANSWER < limits

Its parent is the rank. On stdin comes a line of JSON for every change: the limits that hold from now on, each with what
is limited, since when and until when (time.monotonic), and the flag that says so. STACKS is a file into which the
rank's faulthandler writes on STACKS_SIGNAL; ASK and ANSWER are pipes to a thread of the rank, which tells of its
collectives.

The report is one file for all ranks. That it exists is how the monitors of the other ranks learn of the end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

STACKS_SIGNAL = signal.SIGRTMIN + 8
POLL = 0.5  # seconds
SECTION = "==== rank "
_FOR_STACKS = 3.0
_FOR_COLLECTIVES = 2.0
_FOR_OTHERS = 6.0

Limit = dict[str, Any]


class Monitor:
    def __init__(self, rank: int, world_size: int, report: str, stacks: int, ask: int, answer: int) -> None:
        self._rank, self._world_size, self._report = rank, world_size, report
        self._stacks, self._ask, self._answer = stacks, ask, answer
        self._parent = os.getppid()
        self._limits: list[Limit] = []
        self._unread = b""

    def run(self) -> None:
        while self._parent_lives():
            passed = [limit for limit in self._limits if time.monotonic() > limit["until"]]
            if passed or os.path.exists(self._report):
                self._end_rank(passed[-1] if passed else None)
                return
            if not self._hear(POLL):
                return

    def _hear(self, seconds: float) -> bool:
        """Take in what the rank has written. False: it has closed its end."""
        if not select.select([0], [], [], seconds)[0]:
            return True
        data = os.read(0, 65536)
        *lines, self._unread = (self._unread + data).split(b"\n")
        if lines:
            self._limits = json.loads(lines[-1])
        return bool(data)

    def _end_rank(self, passed: Limit | None) -> None:
        section = "\n".join([self._title(passed), *self._doings(), self._collectives(), self._python_stacks(), ""])
        report = os.open(self._report, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(report, section.encode(errors="replace"))  # in one piece: other ranks write as well
        os.close(report)
        if passed is not None:
            print(_message(self._rank, passed, self._report), file=sys.stderr, flush=True)
        self._wait_for_others()
        if self._parent_lives():
            os.kill(self._parent, signal.SIGKILL)

    def _title(self, passed: Limit | None) -> str:
        why = "stopped because another rank is stuck" if passed is None else _beyond(passed)
        where = f"{socket.gethostname()}, process {self._parent}, {time.strftime('%Y-%m-%d %H:%M:%S')}"
        return f"{SECTION}{self._rank} of {self._world_size}, {where}: {why}"

    def _doings(self) -> list[str]:
        now = time.monotonic()
        return [f"{limit['what']}: since {now - limit['since']:.1f} s" for limit in self._limits]

    def _collectives(self) -> str:
        os.write(self._ask, b"?")
        if select.select([self._answer], [], [], _FOR_COLLECTIVES)[0]:
            return os.read(self._answer, 65536).decode(errors="replace")
        return "collectives: no thread of this rank answers, so something holds the interpreter's lock: see the stacks"

    def _python_stacks(self) -> str:
        os.kill(self._parent, STACKS_SIGNAL)
        end, size = time.monotonic() + _FOR_STACKS, -1
        while time.monotonic() < end and (size <= 0 or size != os.fstat(self._stacks).st_size):
            size = os.fstat(self._stacks).st_size
            time.sleep(0.2)
        said = os.pread(self._stacks, 1 << 20, 0).decode(errors="replace")
        return said or "stacks: the process does not answer signals"

    def _wait_for_others(self) -> None:
        end = time.monotonic() + _FOR_OTHERS
        while time.monotonic() < end:
            with open(self._report, encoding="utf-8", errors="replace") as file:
                if sum(line.startswith(SECTION) for line in file) >= self._world_size:
                    return
            time.sleep(0.1)

    def _parent_lives(self) -> bool:
        return os.getppid() == self._parent


def _beyond(limit: Limit) -> str:
    return f"{limit['what']} is not done after {limit['until'] - limit['since']:g} s ({limit['flag']})"


def _message(rank: int, limit: Limit, report: str) -> str:
    return (
        f"swift_megatron_grpo: rank {rank} is stuck: {_beyond(limit)}. The run ends here, on all ranks. "
        f"What every rank was doing, with its stacks and collectives: {report}. "
        f"If this is just slow: {limit['advice']}"
    )


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank decides what Ctrl-C means
    rank, world_size, report, *descriptors = sys.argv[1:]
    Monitor(int(rank), int(world_size), report, *map(int, descriptors)).run()
