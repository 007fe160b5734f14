"""torchrun lets the ranks of this trainer stop: it passes signals on and waits for --stop_grace instead of 30 s.

torchrun's own handler raises an exception at SIGTERM and SIGINT, signals the ranks, waits 30 s, and ends with a
traceback. Here the handler only passes the signal on, and torchrun ends when its ranks have, with their exit code. If a
rank fails, torchrun ends the others with SIGTERM, which would ask them to stop and save: they are killed instead. The
message of ranks that refuse a run is the last thing that is printed (runtime/refusals.py). On a machine without a GPU,
the ranks are forks of torchrun, which imports for all of them. With several machines, torchrun names those that do not
begin (meeting.py), finds a lost one (lost_machine.py), and ends with a line about it.
"""

import atexit
import gc
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from swift_megatron_grpo.plugin import command_line, rank
from swift_megatron_grpo.plugin.lost_machine import LossOfMachine, other_machines
from swift_megatron_grpo.plugin.meeting import NeverBegun, naming_absent_machines
from swift_megatron_grpo.runtime.import_hooks import after_import
from swift_megatron_grpo.runtime.refusals import expect_refusals, take_refusals

DEFAULT_GRACE = 120.0  # of --stop_grace
FAILURE_VARIABLE = "SWIFT_MEGATRON_GRPO_FAILURE"  # set by launch/: a file for the reason why ranks have failed
_REPORT_SECONDS = 15.0  # after the grace, for the watchdog of a stuck rank to write its report
_SECOND_SIGNAL_SECONDS = 5.0  # for ranks to end at a second signal
_EXIT_SECONDS = 30.0  # between the exit of the first rank and that of the last
_KILLED_SECONDS = 0.5  # between the exit of a rank that lost a connection and that of the killed rank at its other end
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_NOTHING_SAVED = "{} ended the run before its first step; nothing was saved"
_STOPPED = {128 + number for number in _SIGNALS}  # exit codes of a rank that has stopped
_FOLLOWING = (-signal.SIGABRT, -signal.SIGTERM)  # exit codes of a rank that ends because another one has


def hook_torchrun(args: list[str]) -> None:
    """Change what this torchrun does. `args`: of its ranks."""
    refusals = expect_refusals(os.environ)
    after_import("torch.distributed.elastic.agent.server.api", _name_absent_machines)
    after_import("torch.distributed.elastic.multiprocessing.api", lambda api: _patch(api, args, refusals))


def _name_absent_machines(api: ModuleType) -> None:
    stock = api.SimpleElasticAgent._rendezvous

    def rendezvous(self: Any, group: Any) -> None:
        try:
            with naming_absent_machines(group.spec.rdzv_handler, _print):
                stock(self, group)
        except NeverBegun as error:
            if FAILURE_VARIABLE in os.environ:
                _leave_to_launch(str(error))
            _print(str(error))
            _exit(1)

    api.SimpleElasticAgent._rendezvous = rendezvous


def _patch(api: ModuleType, args: list[str], refusals: Path) -> None:
    context = api.PContext
    stock_start, stock_wait, stock_close = context.start, context.wait, context.close

    def start(self: Any) -> None:
        if sys.platform == "linux" and not rank.has_accelerator():  # elsewhere libraries do not survive a fork
            _fork_ranks(api.SubprocessHandler, args)
        stock_start(self)
        gc.unfreeze()  # or Python would report at its exit, as leaks, what was frozen for forks
        self.stop = StopOfRanks(self, command_line.seconds_of(args, "stop_grace", DEFAULT_GRACE), refusals)
        self.loss = LossOfMachine(other_machines(self.envs), args, refusals, partial(self.stop.end_others, 0), _print)

    def wait(self: Any, timeout: float = -1, period: float = 1) -> Any:
        try:
            self.stop.exit_if_refused()
            self.stop.exit_if_stopped()
        except SystemExit as end:
            self.loss.tell_others("" if end.code in _STOPPED else "its ranks refused the run")
            raise
        if self.loss.ends_run():
            _exit(1)
        result = stock_wait(self, timeout, period)
        if result is not None and not result.failures:
            self.loss.tell_others("")
        elif result is not None:
            first = _first(result.failures[each] for each in self.ended if each in result.failures)
            self.loss.tell_others(f"local rank {first.local_rank}, {_how(first.exitcode)}")
            if FAILURE_VARIABLE in os.environ:
                _leave_to_launch(f"rank {self.envs[first.local_rank]['RANK']} has ended: {_how(first.exitcode)}")
        return result

    def close(self: Any, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        self.ended = ended_ranks({each: handler.proc for each, handler in self.subprocess_handlers.items()})
        stock_close(self, death_sig or signal.SIGKILL, timeout)

    context.start, context.wait, context.close = start, wait, close


def _fork_ranks(handler: Any, args: list[str]) -> None:
    """Import in this process what ranks with these arguments import, and make torchrun's handler fork them."""
    from swift_megatron_grpo.platforms.cpu import forks

    def end(number: int, frame: FrameType | None) -> NoReturn:
        _print(_NOTHING_SAVED.format(signal.Signals(number).name))
        os._exit(128 + number)

    for number in _SIGNALS:
        signal.signal(number, end)
    rank.import_for_forks(args)
    stock_popen = handler._popen

    def popen(self: Any, command: tuple[str, ...], environment: dict[str, str]) -> Any:
        first, option, _ = command_line.program_of(command)
        argv = command[first:]
        if option or command_line.classify(argv, command) != command_line.RANK or command_line.asks_for_check(argv):
            return stock_popen(self, command, environment)

        def begin() -> None:
            for file, descriptor in ((self._stdout, 1), (self._stderr, 2)):
                if file is not None:
                    os.dup2(file.fileno(), descriptor)
            rank.end_with_torchrun(environment)

        return forks.run_in_fork(argv, environment, begin)

    handler._popen = popen


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
            self.end_others(0)
            _print(message)
            _exit(1)

    def exit_if_stopped(self) -> None:
        """Raise SystemExit once a rank has stopped at a signal, or has not stopped in time."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        stopped = [code for code in codes.values() if code in _STOPPED]
        died = self._signal is not None and any(code == -self._signal for code in codes.values())
        if stopped:
            self.end_others(_EXIT_SECONDS)
            _exit(stopped[0])
        if self._signal is not None and died:
            self.end_others(_SECOND_SIGNAL_SECONDS)
            _print(_NOTHING_SAVED.format(self._signal.name))
            _exit(128 + self._signal)
        if self._signal is not None and time.monotonic() > self._deadline:
            alive = [rank for rank, code in codes.items() if code is None]
            self.end_others(0)
            _print(
                f"local ranks {', '.join(map(str, alive))} did not stop in time after {self._signal.name} and were "
                f"killed; the steps since the last checkpoint are lost (--stop_grace {self._grace:g})"
            )
            _exit(128 + self._signal)

    def end_others(self, seconds: float) -> None:
        """Wait for all ranks to exit, then kill what is left of them and of the processes that they started."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(process.poll() is None for process in self._processes.values()):
            time.sleep(0.05)
        for process in self._processes.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # each rank leads a process group
            process.wait()


def _leave_to_launch(reason: str) -> NoReturn:
    """Exit without torchrun's table: what has started this torchrun prints the last line of the run."""
    Path(os.environ[FAILURE_VARIABLE]).write_text(reason, encoding="utf-8")
    _exit(1)


def ended_ranks(processes: Mapping[int, Any]) -> list[int]:
    """Return the local ranks that have ended by themselves, once one of them has failed.

    A rank that is killed closes its connections before it ends, so a rank that follows may end first.
    """
    ended = [each for each, process in processes.items() if process.poll() is not None]
    others, end = processes.keys() - ended, time.monotonic() + _KILLED_SECONDS
    while time.monotonic() < end and any(processes[each].poll() is None for each in others):
        time.sleep(0.05)
    return ended + [each for each in others if _is_killed(processes[each].poll() or 0)]


def _is_killed(code: int) -> bool:
    """Return True for the exit code of a rank that did not end because another one had."""
    return code < 0 and code not in _FOLLOWING


def _first(failures: Iterable[Any]) -> Any:
    """Return the failure that the others followed. Their times are whole seconds: a busy torchrun sees several at once.

    A rank that loses a connection to another one raises or aborts; no rank is killed because another one has ended.
    """
    return min(failures, key=lambda each: (not _is_killed(each.exitcode), each.timestamp))


def _how(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _exit(code: int) -> NoReturn:
    """Exit, without Python's teardown of what was imported for the ranks: it would print what compiled modules leak."""
    atexit.register(end_at_once, code)
    raise SystemExit(code)


def end_at_once(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _print(line: str) -> None:
    print(f"swift_megatron_grpo: {line}", file=sys.stderr, flush=True)
