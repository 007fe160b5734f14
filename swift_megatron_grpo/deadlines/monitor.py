"""A small process for each rank: past a deadline it appends the rank's state to a report and kills the rank.

A separate process, because it has to work while the rank hangs in a collective, or in C code that holds the
interpreter's lock. It is run as a script, by its path, and imports the standard library only.

    python monitor.py RANK WORLD_SIZE REPORT STACKS REQUEST RESPONSE < limits

Its parent is the rank. On every change the rank writes one line of JSON to stdin, which replaces all limits: for each
what is limited, its start and deadline (time.monotonic), the flag that sets it, and advice. STACKS is a file into which
the rank's faulthandler writes on STACKS_SIGNAL. REQUEST and RESPONSE are pipes to a thread of the rank, which reports
its collectives.

The report is one file for all ranks. Once it exists, the monitors of the other ranks end their ranks as well.
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
POLL_SECONDS = 0.5
SECTION = "==== rank "
# How long the monitor waits for parts of the report, in seconds.
_STACKS_SECONDS = 3.0
_COLLECTIVES_SECONDS = 2.0
_OTHER_RANKS_SECONDS = 6.0

Limit = dict[str, Any]


class Monitor:
    def __init__(self, rank: int, world_size: int, report: str, stacks: int, request: int, response: int) -> None:
        self._rank, self._world_size, self._report = rank, world_size, report
        self._stacks, self._request, self._response = stacks, request, response
        self._parent = os.getppid()
        self._limits: list[Limit] = []
        self._unread = b""

    def run(self) -> None:
        while self._parent_is_alive():
            exceeded = [limit for limit in self._limits if time.monotonic() > limit["until"]]
            if exceeded or os.path.exists(self._report):
                self._report_and_kill(exceeded[-1] if exceeded else None)
                return
            if not self._read_limits(POLL_SECONDS):
                return

    def _read_limits(self, seconds: float) -> bool:
        """Wait up to `seconds` for new limits. Returns False if the rank has closed its end of the pipe."""
        if not select.select([0], [], [], seconds)[0]:
            return True
        data = os.read(0, 65536)
        *lines, self._unread = (self._unread + data).split(b"\n")
        if lines:
            self._limits = json.loads(lines[-1])
        return bool(data)

    def _report_and_kill(self, exceeded: Limit | None) -> None:
        """Append this rank's section to the report, wait for the sections of the other ranks, and kill the rank."""
        parts = [self._title(exceeded), *self._running_limits(), self._collectives(), self._python_stacks(), ""]
        section = "\n".join(parts)
        report = os.open(self._report, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(report, section.encode(errors="replace"))  # in a single write, because other ranks append as well
        os.close(report)
        if exceeded is not None:
            print(_message(self._rank, exceeded, self._report), file=sys.stderr, flush=True)
        self._wait_for_others()
        if self._parent_is_alive():
            os.kill(self._parent, signal.SIGKILL)

    def _title(self, exceeded: Limit | None) -> str:
        reason = "stopped because another rank is stuck" if exceeded is None else _overrun(exceeded)
        where = f"{socket.gethostname()}, process {self._parent}, {time.strftime('%Y-%m-%d %H:%M:%S')}"
        return f"{SECTION}{self._rank} of {self._world_size}, {where}: {reason}"

    def _running_limits(self) -> list[str]:
        now = time.monotonic()
        return [f"{limit['what']}: since {now - limit['since']:.1f} s" for limit in self._limits]

    def _collectives(self) -> str:
        os.write(self._request, b"?")
        if select.select([self._response], [], [], _COLLECTIVES_SECONDS)[0]:
            return os.read(self._response, 65536).decode(errors="replace")
        return "collectives: no thread of this rank responds, so something holds the interpreter's lock: see the stacks"

    def _python_stacks(self) -> str:
        os.kill(self._parent, STACKS_SIGNAL)
        end, size = time.monotonic() + _STACKS_SECONDS, -1
        while time.monotonic() < end and (size <= 0 or size != os.fstat(self._stacks).st_size):
            size = os.fstat(self._stacks).st_size
            time.sleep(0.2)
        stacks = os.pread(self._stacks, 1 << 20, 0).decode(errors="replace")
        return stacks or "stacks: the process does not respond to signals"

    def _wait_for_others(self) -> None:
        end = time.monotonic() + _OTHER_RANKS_SECONDS
        while time.monotonic() < end:
            with open(self._report, encoding="utf-8", errors="replace") as file:
                if sum(line.startswith(SECTION) for line in file) >= self._world_size:
                    return
            time.sleep(0.1)

    def _parent_is_alive(self) -> bool:
        return os.getppid() == self._parent


def _overrun(limit: Limit) -> str:
    return f"{limit['what']} has not finished after {limit['until'] - limit['since']:g} s ({limit['flag']})"


def _message(rank: int, limit: Limit, report: str) -> str:
    return (
        f"swift_megatron_grpo: rank {rank} is stuck: {_overrun(limit)}. The run ends now, on all ranks. "
        f"The state of every rank, with its stacks and collectives, is in {report}. "
        f"If the run is only slow: {limit['advice']}"
    )


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the rank
    rank, world_size, report, *descriptors = sys.argv[1:]
    Monitor(int(rank), int(world_size), report, *map(int, descriptors)).run()
