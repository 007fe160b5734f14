"""The rank's side of the monitor: starts it, and sends it the deadlines of phases and reward functions."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from swift_megatron_grpo.deadlines import monitor
from swift_megatron_grpo.deadlines.collectives import describe_collectives
from swift_megatron_grpo.deadlines.interrupt import interrupted_after

logger = logging.getLogger(__name__)
_BETWEEN_PHASES = "logging, checkpoints and callbacks, between phases"
_GRACE_SECONDS = 10.0  # for interrupted code to clean up


class Watchdog:
    """Deadlines of one rank. Limits nest: a phase, and a reward function within it."""

    def __init__(
        self, report: Path, rank: int, world_size: int, phase_timeout: float, exit_timeout: float = 30.0
    ) -> None:
        """Start the monitor. `report`: one file for all ranks of this run.

        Limits in seconds: `phase_timeout` for a phase, 0 for no limit; `exit_timeout` for the exit after an error.
        """
        self._phase_timeout, self._exit_timeout = phase_timeout, exit_timeout
        self._limits: list[monitor.Limit] = []
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115  # stays open for the life of this process
        faulthandler.register(monitor.STACKS_SIGNAL, file=self._stacks, all_threads=True)
        requests, send_request = os.pipe()
        receive_response, responses = os.pipe()
        threading.Thread(target=_report_collectives, args=(requests, responses), name="watchdog", daemon=True).start()
        descriptors = (self._stacks.fileno(), send_request, receive_response)
        self._monitor = subprocess.Popen(
            [sys.executable, "-I", "-S", monitor.__file__, *map(str, (rank, world_size, report, *descriptors))],
            stdin=subprocess.PIPE,
            pass_fds=descriptors,
        )
        os.close(send_request)
        os.close(receive_response)
        self._hook, sys.excepthook = sys.excepthook, self._on_uncaught
        self._send_limits()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self._limited(f"phase {name}", self._phase_timeout, self._phase_flag, "use a larger --phase_timeout"):
            yield

    @contextmanager
    def limit(self, what: str, seconds: float, flag: str) -> Iterator[None]:
        """Raise DeadlineExceeded in the block after `seconds`; a block that does not end then ends the run."""
        advice = f"use a larger {flag}"
        with self._limited(what, seconds + _GRACE_SECONDS, f"{flag} {seconds:g}", advice), interrupted_after(seconds):
            yield

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Limit how long this process may take to exit: a thread left by a reward function could block it forever."""
        self._hook(kind, error, trace)
        what = "the exit of the process after the error above"
        self._limits = [
            _limit(what, self._exit_timeout, "after an error", "the stacks show what keeps the process alive")
        ]
        self._send_limits()

    def close(self) -> None:
        sys.excepthook = self._hook
        assert self._monitor.stdin is not None
        self._monitor.stdin.close()
        self._monitor.wait()

    @property
    def _phase_flag(self) -> str:
        return f"--phase_timeout {self._phase_timeout:g}"

    @contextmanager
    def _limited(self, what: str, seconds: float, flag: str, advice: str) -> Iterator[None]:
        if seconds == 0:
            yield
            return
        self._limits.append(_limit(what, seconds, flag, advice))
        self._send_limits()
        try:
            yield
        finally:
            self._limits.pop()
            self._send_limits()

    def _send_limits(self) -> None:
        limits = self._limits
        if not limits and self._phase_timeout:
            limits = [_limit(_BETWEEN_PHASES, self._phase_timeout, self._phase_flag, "use a larger --phase_timeout")]
        assert self._monitor.stdin is not None
        try:
            os.write(self._monitor.stdin.fileno(), json.dumps(limits).encode() + b"\n")
        except BrokenPipeError:
            logger.warning("the watchdog process has exited; a stuck run will no longer be detected")


def _limit(what: str, seconds: float, flag: str, advice: str) -> monitor.Limit:
    now = time.monotonic()
    return {"what": what[:200], "since": now, "until": now + seconds, "flag": flag, "advice": advice}


def _report_collectives(requests: int, responses: int) -> None:
    while os.read(requests, 1):
        # Writes of up to PIPE_BUF bytes are atomic.
        os.write(responses, describe_collectives().encode()[: select.PIPE_BUF])
