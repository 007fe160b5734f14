"""The rank's side of the monitor: starts it, sends it deadlines, and describes this rank's unfinished collectives."""

import faulthandler
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from torch._C import _distributed_c10d

from swift_megatron_grpo.runtime.deadlines import monitor
from swift_megatron_grpo.runtime.deadlines.interrupt import interrupted_after

logger = logging.getLogger(__name__)
_GRACE_SECONDS = 10.0  # for interrupted code to clean up
# The recorder of NCCL, in CUDA builds only, and the one of the other backends.
_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_SHOWN = 20


class Watchdog:
    """Deadlines of one rank. Limits nest: a phase, and a reward function within it."""

    def __init__(
        self, report: Path, rank: int, world_size: int, phase_timeout: float, exit_timeout: float = 30.0
    ) -> None:
        """Start the monitor. `report`: one file for all ranks of this run.

        Limits in seconds: `phase_timeout` for a phase, 0 for no limit; `exit_timeout` for the exit after an error.
        """
        self._phase_timeout, self._exit_timeout = phase_timeout, exit_timeout
        self._lock = threading.Lock()  # guards the limits: a thread adds one when the run stops
        self._limits: list[monitor.Limit] = []
        self._overall: list[monitor.Limit] = []  # limits on everything from now on: a stop, the exit
        # Both are in memory, because a disk may be full. The monitor inherits them.
        self._limits_file, self._stacks = os.memfd_create("limits"), os.memfd_create("stacks")
        faulthandler.register(monitor.STACKS_SIGNAL, file=self._stacks, all_threads=True)
        requests, send_request = os.pipe()
        receive_response, responses = os.pipe()
        threading.Thread(target=_report_collectives, args=(requests, responses), name="watchdog", daemon=True).start()
        names = (os.getpid(), rank, world_size, report)
        descriptors = (self._limits_file, self._stacks, send_request, receive_response)
        self._monitor: subprocess.Popen[bytes] | None = None  # None: it has exited
        self._send_limits()
        self._monitor = subprocess.Popen(
            [sys.executable, "-I", "-S", monitor.__file__, *map(str, (*names, *descriptors))],
            stdin=subprocess.PIPE,
            pass_fds=descriptors,
        )
        os.close(send_request)
        os.close(receive_response)
        os.register_at_fork(after_in_child=self._leave_to_parent)
        self._hook, sys.excepthook = sys.excepthook, self._on_uncaught

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._limited(self._phase_limit(f"phase {name}"))

    @contextmanager
    def limit(
        self, what: str, seconds: float | None, flag: str, give_up: Callable[[], bool] | None = None
    ) -> Iterator[None]:
        """Limit a block of code that users wrote, and name it if the process ends within it.

        Raises DeadlineExceeded in the block after `seconds` (None: no limit), or as soon as `give_up` returns True. A
        block that does not end then ends the run.
        """
        allowed = None if seconds is None else seconds + _GRACE_SECONDS
        blame = f"{what}: the function called os._exit, or it crashed in C code"
        with (
            self._limited(_limit(what, allowed, f"{flag} {seconds or 0:g}", f"use a larger {flag}", blame)),
            interrupted_after(seconds, give_up),
        ):
            yield

    def limit_everything(self, what: str, seconds: float, flag: str, advice: str) -> None:
        """End the process after `seconds`, whatever it does then. Any thread may call this."""
        with self._lock:
            self._overall.append(_limit(what, seconds, flag, advice))
        self._send_limits()

    def expect_exit(self) -> None:
        """Do not blame the code that is running now for the end of this process. Any thread may call this."""
        with self._lock:
            self._limits = []
        self._send_limits()

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Limit how long this process may take to exit: a thread left by a reward function could block it forever."""
        self._hook(kind, error, trace)
        self.expect_exit()
        what, advice = "the exit of the process after the error above", "the stacks show what keeps the process alive"
        self.limit_everything(what, self._exit_timeout, "after an error", advice)

    def close(self) -> None:
        sys.excepthook = self._hook
        if self._monitor is not None:
            assert self._monitor.stdin is not None
            self._monitor.stdin.close()
            self._monitor.wait()
            self._monitor = None

    def _phase_limit(self, what: str) -> monitor.Limit:
        flag = f"--phase_timeout {self._phase_timeout:g}"
        return _limit(what, self._phase_timeout or None, flag, "use a larger --phase_timeout")

    def _leave_to_parent(self) -> None:
        """Close a forked child's copy of the pipe, which otherwise would hide the end of this rank."""
        if self._monitor is not None and self._monitor.stdin is not None:
            self._monitor.stdin.close()
            self._monitor = None

    @contextmanager
    def _limited(self, limit: monitor.Limit) -> Iterator[None]:
        with self._lock:
            self._limits.append(limit)
        self._send_limits()
        try:
            yield
        finally:
            with self._lock:
                self._limits = [other for other in self._limits if other is not limit]
            self._send_limits()

    def _send_limits(self) -> None:
        """Write all limits to the memory that the monitor reads. This never waits for the monitor."""
        with self._lock:
            limits = [*self._limits, *self._overall]
            if not limits and self._phase_timeout:
                limits = [self._phase_limit("logging, checkpoints and callbacks, between phases")]
            os.pwrite(self._limits_file, monitor.encode_limits(limits), 0)
            if self._monitor is not None and self._monitor.poll() is not None:
                self._monitor = None
                logger.warning("the watchdog process has exited; a stuck run will no longer be detected")


def _limit(what: str, seconds: float | None, flag: str, advice: str, blame: str = "") -> monitor.Limit:
    now = time.monotonic()
    until = None if seconds is None else now + seconds
    return {"what": what[:200], "since": now, "until": until, "flag": flag, "advice": advice, "blame": blame[:400]}


def _report_collectives(requests: int, responses: int) -> None:
    while os.read(requests, 1):
        # Writes of up to PIPE_BUF bytes are atomic.
        os.write(responses, describe_collectives().encode()[: select.PIPE_BUF])


# ---- unfinished collectives, from torch's flight recorder


def describe_collectives() -> str:
    built = [vars(_distributed_c10d)[name] for name in _RECORDERS if name in vars(_distributed_c10d)]
    entries = [entry for dump in built for entry in json.loads(dump()).get("entries", [])]
    return format_entries(entries, time.time_ns())


def format_entries(entries: Sequence[dict[str, Any]], now: int) -> str:
    """List the collectives that have not finished, and the last one that has."""
    if not entries:
        return "collectives: none recorded"
    finished, unfinished = list[dict[str, Any]](), list[dict[str, Any]]()
    for entry in sorted(entries, key=lambda entry: int(entry["time_created_ns"])):
        (finished if entry["retired"] or entry["state"] == "completed" else unfinished).append(entry)
    lines = [f"collectives, not finished: {len(unfinished)}"]
    lines += [f"  {_line(entry, now)}" for entry in unfinished[-_SHOWN:]]
    if finished:
        lines.append(f"last finished: {_line(finished[-1], now)}")
    return "\n".join(lines)


def _line(entry: dict[str, Any], now: int) -> str:
    group = " ".join(entry["process_group"])
    ago = (now - int(entry["time_created_ns"])) / 1e9
    return f"{entry['profiling_name']} of {entry['input_sizes']} in group {group}, {ago:.1f} s ago"
