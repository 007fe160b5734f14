"""Processes that are forks of this one, which has imported what they need, in place of `python SCRIPT ARGUMENTS`.

Without a GPU, the ranks of a machine share its cores, and each would import ms-swift, Megatron and vLLM for itself,
which takes 6 to 15 CPU seconds. On a GPU torchrun itself initializes CUDA, after which a fork cannot use it.
"""

import atexit
import logging
import os
import random
import runpy
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

_NOT_FLUSHED = 120  # Python's exit code
_LOGGERS = ("swift", "modelscope")  # ms-swift sets their level by LOCAL_RANK, at import


class Fork:
    """A forked process, with what torchrun uses of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal that ended the process; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def run_in_fork(argv: Sequence[str], environment: Mapping[str, str], begin: Callable[[], None]) -> Fork:
    """Run `python ARGV` in a fork that leads its own session; `begin` is called in it, first."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Fork(pid)
    code = 1
    try:
        code = _run_as_process(argv, environment, begin)
    finally:
        os._exit(code)  # whatever happens: above this frame is the parent's code


def _run_as_process(argv: Sequence[str], environment: Mapping[str, str], begin: Callable[[], None]) -> int:
    """Run the script, and end as the interpreter does, but for its teardown; return the exit code."""
    os.setsid()
    _close_sockets()
    atexit._clear()  # what the parent registered is for its own exit
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    code = 0
    try:
        os.environ.clear()
        os.environ.update(environment)
        begin()
        _adapt()
        _run(argv)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or _NOT_FLUSHED
    return code & 0xFF


def _close_sockets() -> None:
    """Close the parent's sockets: the port of its store would otherwise stay open when the parent has ended."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # that of the folder is closed by now
            if descriptor > 2 and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.close(descriptor)


def _adapt() -> None:
    """Repeat what the imports have done for the environment of the parent."""
    import torch

    random.seed()  # or all ranks would draw the same ports
    for stream in (sys.stdout, sys.stderr):  # torchrun asks for `python -u`
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    if os.environ.get("LOCAL_RANK", "0") != "0":
        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)


def _run(argv: Sequence[str]) -> None:
    sys.orig_argv, sys.argv = [sys.executable, *argv], list(argv)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(argv[0])
    runpy.run_path(argv[0], run_name="__main__")
