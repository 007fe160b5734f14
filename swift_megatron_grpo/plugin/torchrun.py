"""torchrun lets the ranks of this trainer stop: it passes signals on and waits for --stop_grace instead of 30 s.

torchrun's own handler raises an exception at SIGTERM and SIGINT, signals the ranks, waits 30 s, and ends with a
traceback. Here the handler only passes the signal on, and torchrun ends when its ranks have, with their exit code. If a
rank fails, torchrun ends the others with SIGTERM, which would ask them to stop and save: they are killed instead. The
message of ranks that refuse a run is the last thing that is printed (runtime/refusals.py).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from swift_megatron_grpo.plugin.command_line import parse_flag
from swift_megatron_grpo.runtime.import_hooks import after_import
from swift_megatron_grpo.runtime.refusals import expect_refusals, take_refusals

DEFAULT_GRACE = 120.0  # of --stop_grace
_REPORT_SECONDS = 15.0  # after the grace, for the watchdog of a stuck rank to write its report
_SECOND_SIGNAL_SECONDS = 5.0  # for ranks to end at a second signal
_EXIT_SECONDS = 30.0  # between the exit of the first rank and that of the last
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STOPPED = {128 + number for number in _SIGNALS}  # exit codes of a rank that has stopped


def hook_torchrun(args: list[str]) -> None:
    grace = DEFAULT_GRACE
    with suppress(TypeError, ValueError):  # the ranks refuse other values, with a message
        grace = float(parse_flag(args, "stop_grace") or "")
    refusals = expect_refusals(os.environ)
    after_import("torch.distributed.elastic.multiprocessing.api", lambda api: _patch(api, grace, refusals))


def _patch(api: ModuleType, grace: float, refusals: Path) -> None:
    context = api.PContext
    stock_start, stock_wait, stock_close = context.start, context.wait, context.close

    def start(self: Any) -> None:
        stock_start(self)
        self.stop = StopOfRanks(self, grace, refusals)

    def wait(self: Any, timeout: float = -1, period: float = 1) -> Any:
        self.stop.exit_if_refused()
        self.stop.exit_if_stopped()
        return stock_wait(self, timeout, period)

    def close(self: Any, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        stock_close(self, death_sig or signal.SIGKILL, timeout)

    context.start, context.wait, context.close = start, wait, close


class StopOfRanks:
    """The stop of the ranks on this machine."""

    def __init__(self, context: Any, grace: float, refusals: Path) -> None:
        """Pass signals on from now on. `context`: torch's PContext, whose ranks have just started."""
        self._refusals = refusals
        self._processes = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
        self._grace = grace
        self._signal: signal.Signals | None = None
        self._deadline = float("inf")
        for number in _SIGNALS:
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        seconds = self._grace + _REPORT_SECONDS if self._signal is None else _SECOND_SIGNAL_SECONDS
        self._deadline = min(self._deadline, now + seconds)
        self._signal = signal.Signals(number)
        for process in self._processes.values():
            process.send_signal(number)

    def exit_if_refused(self) -> None:
        """Raise SystemExit once a rank has refused the run, after its message; the ranks are killed before."""
        message = take_refusals(self._refusals)
        if message is not None:
            self._end_others(0)
            _print(message)
            raise SystemExit(1)

    def exit_if_stopped(self) -> None:
        """Raise SystemExit once a rank has stopped at a signal, or has not stopped in time."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        stopped = [code for code in codes.values() if code in _STOPPED]
        died = self._signal is not None and any(code == -self._signal for code in codes.values())
        if stopped:
            self._end_others(_EXIT_SECONDS)
            raise SystemExit(stopped[0])
        if self._signal is not None and died:
            self._end_others(_SECOND_SIGNAL_SECONDS)
            _print(f"{self._signal.name} ended the run before its first step; nothing was saved")
            raise SystemExit(128 + self._signal)
        if self._signal is not None and time.monotonic() > self._deadline:
            alive = [rank for rank, code in codes.items() if code is None]
            self._end_others(0)
            _print(
                f"local ranks {', '.join(map(str, alive))} did not stop in time after {self._signal.name} and were "
                f"killed; the steps since the last checkpoint are lost (--stop_grace {self._grace:g})"
            )
            raise SystemExit(128 + self._signal)

    def _end_others(self, seconds: float) -> None:
        """Wait for all ranks to exit, then kill what is left of them and of the processes that they started."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(process.poll() is None for process in self._processes.values()):
            time.sleep(0.05)
        for process in self._processes.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # each rank leads a process group
            process.wait()


def _print(line: str) -> None:
    print(f"swift_megatron_grpo: {line}", file=sys.stderr, flush=True)
