"""A rank's end of its monitor: what it is doing, and until when that may last."""

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
_BETWEEN = "logging, checkpoints and callbacks, between phases"
_GRACE = 10.0  # seconds that code which was interrupted has for its end
_LAST_CALL = 30.0  # seconds in which a rank ends after an error


class Watchdog:
    """Limits lie within each other: a phase, and in it a reward function."""

    def __init__(self, report: Path, rank: int, world_size: int, phase_timeout: float) -> None:
        """`report`: of all ranks, and of this run only. `phase_timeout`: seconds; 0: phases have no limit."""
        self._phase_timeout = phase_timeout
        self._limits: list[monitor.Limit] = []
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as this process
        faulthandler.register(monitor.STACKS_SIGNAL, file=self._stacks, all_threads=True)
        asked, ask = os.pipe()
        answer, answered = os.pipe()
        threading.Thread(target=_tell_of_collectives, args=(asked, answered), name="watchdog", daemon=True).start()
        descriptors = (self._stacks.fileno(), ask, answer)
        self._monitor = subprocess.Popen(
            [sys.executable, "-I", "-S", monitor.__file__, *map(str, (rank, world_size, report, *descriptors))],
            stdin=subprocess.PIPE,
            pass_fds=descriptors,
        )
        os.close(ask)
        os.close(answer)
        self._hook, sys.excepthook = sys.excepthook, self._on_uncaught
        self._tell()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self._limited(f"phase {name}", self._phase_timeout, self._phase_flag, "use a larger --phase_timeout"):
            yield

    @contextmanager
    def limit(self, what: str, seconds: float, flag: str) -> Iterator[None]:
        """Past the time TimeIsUp is raised in the block; where that does not help, the run ends."""
        advice = f"use a larger {flag}"
        with self._limited(what, seconds + _GRACE, f"{flag} {seconds:g}", advice), interrupted_after(seconds):
            yield

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """The process ends now. A thread that a reward function has left behind would keep it for ever."""
        self._hook(kind, error, trace)
        what = "the end of the process after the error above"
        self._limits = [_limit(what, _LAST_CALL, "after an error", "the stacks show what keeps the process")]
        self._tell()

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
        self._tell()
        try:
            yield
        finally:
            self._limits.pop()
            self._tell()

    def _tell(self) -> None:
        limits = self._limits
        if not limits and self._phase_timeout:
            limits = [_limit(_BETWEEN, self._phase_timeout, self._phase_flag, "use a larger --phase_timeout")]
        assert self._monitor.stdin is not None
        try:
            os.write(self._monitor.stdin.fileno(), json.dumps(limits).encode() + b"\n")
        except BrokenPipeError:
            logger.warning("the watchdog's process is gone; nothing will notice if this run gets stuck")


def _limit(what: str, seconds: float, flag: str, advice: str) -> monitor.Limit:
    now = time.monotonic()
    return {"what": what[:200], "since": now, "until": now + seconds, "flag": flag, "advice": advice}


def _tell_of_collectives(asked: int, answered: int) -> None:
    while os.read(asked, 1):
        os.write(answered, describe_collectives().encode()[: select.PIPE_BUF])  # which arrive in one piece
