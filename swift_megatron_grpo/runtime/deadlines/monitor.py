"""A small process for each rank: past a deadline it appends the rank's state to a report and kills the rank.

A separate process, because it has to work while the rank hangs in a collective, or in C code that holds the
interpreter's lock. It is run as a script, by its path, and imports the standard library only.

    python monitor.py PROCESS RANK WORLD_SIZE REPORT LIMITS STACKS REQUEST RESPONSE

PROCESS is the process id of the rank, its parent. The rank writes all its limits into LIMITS, an anonymous file in
memory, on every change, so that a monitor that is slow or stopped never blocks the rank and reads only the newest
limits. STACKS is such a file too; the rank's faulthandler writes to it on STACKS_SIGNAL. REQUEST and RESPONSE are pipes
to a thread of the rank, which reports its collectives. Standard input is a pipe to which nothing is written: it closes
when the rank ends.

The report is one file for all ranks. Once it exists, the monitors of the other ranks end their ranks as well. If it
cannot be written, the section goes to standard error. The rank is killed in either case.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from typing import Any

STACKS_SIGNAL = signal.SIGRTMIN + 8
POLL_SECONDS = 0.5
LIMITS_BYTES = 1 << 16
SECTION = "==== rank "
# How long the monitor waits for parts of the report, in seconds.
_STACKS_SECONDS = 3.0
_COLLECTIVES_SECONDS = 2.0
_OTHER_RANKS_SECONDS = 6.0
_WRITE_SECONDS = 5.0  # a file system that does not respond must not keep a stuck rank alive
_EXIT_STATUS_SECONDS = 0.3
_KILLED = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT}
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl

# what, since, until (None: no limit), flag, advice, blame (printed if the rank ends in this code)
Limit = dict[str, Any]


def encode_limits(limits: list[Limit]) -> bytes:
    """Return the content of LIMITS, with a checksum that reveals a write in progress."""
    content = json.dumps(limits).encode()
    return b"%08x %08x %s" % (len(content), zlib.crc32(content), content)


def decode_limits(data: bytes) -> list[Limit] | None:
    """Return the limits; None for data that are being written at this moment."""
    with suppress(ValueError):
        size, checksum, content = int(data[:8], 16), int(data[9:17], 16), data[18:]
        if zlib.crc32(content[:size]) == checksum:
            limits: list[Limit] = json.loads(content[:size])
            return limits
    return None


class Monitor:
    def __init__(self, process: int, rank: int, world_size: int, report: str, *descriptors: int) -> None:
        self._parent = process  # not os.getppid(), which is another process if the rank has ended already
        self._rank, self._world_size, self._report = rank, world_size, report
        self._limits_file, self._stacks, self._request, self._response = descriptors
        self._limits: list[Limit] = []
        self._failure = "the file system does not respond"  # why the report was not written; empty once it was
        self._others_report = Event()
        Thread(target=self._watch_report, name="report", daemon=True).start()

    def run(self) -> None:
        while self._parent_is_alive():
            self._limits = self._newest_limits()
            now = time.monotonic()
            exceeded = [limit for limit in self._limits if limit["until"] is not None and now > limit["until"]]
            if exceeded or self._others_report.is_set():
                self._report_and_kill(exceeded[-1] if exceeded else None)
                return
            if select.select([0], [], [], POLL_SECONDS)[0]:  # closed
                break
        self._limits = self._newest_limits()
        self._report_sudden_end()

    def _newest_limits(self) -> list[Limit]:
        limits = decode_limits(os.pread(self._limits_file, LIMITS_BYTES, 0))
        return self._limits if limits is None else limits

    def _watch_report(self) -> None:
        """Detect the report of another rank, in a thread because a file system may not respond."""
        while not os.path.exists(self._report):
            time.sleep(POLL_SECONDS)
        self._others_report.set()

    # ---- a stuck rank

    def _report_and_kill(self, exceeded: Limit | None) -> None:
        """Append this rank's section to the report, wait for the sections of the other ranks, and kill the rank."""
        writing = Thread(target=self._write_section, args=(exceeded,), name="section", daemon=True)
        writing.start()
        writing.join(_COLLECTIVES_SECONDS + _STACKS_SECONDS + _WRITE_SECONDS + _OTHER_RANKS_SECONDS)
        if self._parent_is_alive():
            os.kill(self._parent, signal.SIGKILL)

    def _write_section(self, exceeded: Limit | None) -> None:
        now = time.monotonic()
        running = (f"{limit['what']}: since {now - limit['since']:.1f} s" for limit in self._limits)
        parts = map(_attempt, (self._collectives, self._python_stacks))
        section = "\n".join([self._title(exceeded), *running, *parts, ""])
        if exceeded is not None:
            _print(
                f"swift_megatron_grpo: rank {self._rank} is stuck: {_overrun(exceeded)}. The run ends now, on all "
                f"ranks. The state of every rank, with its stacks and collectives, is in {self._report}. If the run is "
                f"only slow: {exceeded['advice']}"
            )
        appending = Thread(target=self._append, args=(section,), name="append", daemon=True)
        appending.start()
        appending.join(_WRITE_SECONDS)
        if self._failure:
            _print(f"swift_megatron_grpo: the report {self._report} cannot be written: {self._failure}. This is it:")
            _print(section)
        else:
            self._wait_for_others()

    def _append(self, section: str) -> None:
        data = section.encode(errors="replace")
        try:
            report = os.open(self._report, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            written = os.write(report, data)  # in a single write, because other ranks append as well
            os.close(report)
            self._failure = "" if written == len(data) else "no space left on device"
        except OSError as error:
            self._failure = f"{type(error).__name__}: {error}"

    def _title(self, exceeded: Limit | None) -> str:
        reason = "stopped because another rank is stuck" if exceeded is None else _overrun(exceeded)
        where = f"{socket.gethostname()}, process {self._parent}, {time.strftime('%Y-%m-%d %H:%M:%S')}"
        return f"{SECTION}{self._rank} of {self._world_size}, {where}: {reason}"

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

    # ---- a rank that has ended

    def _report_sudden_end(self) -> None:
        """Name the code during which the rank ended, if that code may have ended it."""
        blamed = [limit["blame"] for limit in self._limits if limit["blame"]]
        if not blamed:
            return
        status = self._exit_status()
        if status is not None and (os.WIFSIGNALED(status) and os.WTERMSIG(status) in _KILLED):
            return  # from outside
        _print(f"swift_megatron_grpo: rank {self._rank} ended {_how(status)} during {blamed[-1]}")

    def _exit_status(self) -> int | None:
        """Return the wait status of the rank; None if its parent has already read it."""
        end = time.monotonic() + _EXIT_STATUS_SECONDS
        with suppress(OSError, IndexError, ValueError):
            while time.monotonic() < end:
                with open(f"/proc/{self._parent}/stat", encoding="utf-8", errors="replace") as file:
                    fields = file.read().rpartition(")")[2].split()
                if fields[0] == "Z":
                    return int(fields[49])
                time.sleep(0.001)
        return None

    def _parent_is_alive(self) -> bool:
        return os.getppid() == self._parent


def _attempt(describe: Callable[[], str]) -> str:
    """Return a part of the report, or the error that prevented it: no part may prevent the kill."""
    try:
        return describe()
    except OSError as error:
        return f"{describe.__name__.strip('_')}: {type(error).__name__}: {error}"


def _print(text: str) -> None:
    with suppress(OSError, ValueError):  # standard error may be a full disk or a closed pipe
        print(text, file=sys.stderr, flush=True)


def _how(status: int | None) -> str:
    if status is None:
        return "suddenly"
    if os.WIFSIGNALED(status):
        return f"by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"with exit code {os.WEXITSTATUS(status)}"


def _overrun(limit: Limit) -> str:
    return f"{limit['what']} has not finished after {limit['until'] - limit['since']:g} s ({limit['flag']})"


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the rank handles them, and needs its deadlines while it stops
    # A stopped monitor continues when its rank ends, and ends as well.
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGCONT)
    process, rank, world_size, report, *descriptors = sys.argv[1:]
    Monitor(int(process), int(rank), int(world_size), report, *map(int, descriptors)).run()
    os._exit(0)  # threads may wait for a file system


if __name__ == "__main__":
    main()
