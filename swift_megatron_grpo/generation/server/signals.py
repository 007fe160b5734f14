"""SIGTERM and SIGINT end the server with all of its processes within seconds, and in order.

uvicorn alone would wait for requests in progress, which may take minutes, and handle no signal while the model loads.
Trainers retry unfinished requests on other servers.

Ctrl-C sends SIGINT to every process of the server, but only the web server handles it. vLLM's processes end at it by
themselves, whatever handler they inherit; one that ends before the web server closes the engine looks like a failure,
and vLLM logs a traceback about it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module
from types import FrameType
from typing import Any

import psutil
import uvicorn

_REQUESTS_SECONDS = 1  # for requests in progress
_EXIT_SECONDS = 6.0  # for the engine to exit; then it is killed
# The functions that vLLM's processes run. A version of vLLM without one of them has no such process.
ENTRIES = (
    ("vllm.v1.engine.core", "EngineCoreProc", "run_engine_core"),
    ("vllm.v1.engine.coordinator", "DPCoordinatorProc", "run_coordinator"),
    ("vllm.v1.executor.multiproc_executor", "WorkerProc", "worker_main"),
)
_entries: dict[tuple[str, str, str], Callable[..., Any]] = {}  # vLLM's functions, before they are replaced


@contextmanager
def end_at_signals() -> Iterator[None]:
    """Handle the signals around the whole life of a server. Exit with 128 + the signal."""
    end = _EndAtSignals()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end.on_signal)

    def capture_signals(server: uvicorn.Server) -> AbstractContextManager[None]:
        """Replace uvicorn's own handling of signals."""
        end.server = server
        return nullcontext()

    uvicorn.Server.capture_signals = capture_signals  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if end.received is not None:  # also if the engine's end was noticed first
            raise SystemExit(128 + end.received)


class _EndAtSignals:
    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._pid = os.getpid()
        self.server: uvicorn.Server | None = None  # None before it serves

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child, for which the default holds
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        first, self.received = self.received is None, signal.Signals(number)
        if first:
            line = f"the rollout server received {self.received.name} and ends, with all of its processes"
            print(f"swift_megatron_grpo: {line}", file=sys.stderr, flush=True)
        if first and self.server is not None and self.server.started:
            self.server.config.timeout_graceful_shutdown = _REQUESTS_SECONDS
            self.server.should_exit = True
            threading.Thread(target=self._end_later, args=(number,), daemon=True).start()
        else:
            _end_now(number)

    def _end_later(self, number: int) -> None:
        time.sleep(_EXIT_SECONDS)
        _end_now(number)


def _end_now(number: int) -> None:
    """Kill every process of this server and exit."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(128 + number)


class _Uninterrupted:
    """One of vLLM's functions. It is sent to a new process by name, because vLLM may spawn instead of fork."""

    def __init__(self, entry: tuple[str, str, str]) -> None:
        self._entry = entry

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ignore_interrupts()
        return _entries[self._entry](*args, **kwargs)


def ignore_interrupts() -> None:
    """Ignore SIGINT from now on, in this process and in all of vLLM's that it starts. Idempotent."""
    if not isinstance(signal.signal, _KeepIgnored):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal = _KeepIgnored(signal.signal)  # type: ignore[assignment]
    for entry in ENTRIES:
        module_name, class_name, name = entry
        try:
            owner = getattr(import_module(module_name), class_name)
            function = getattr(owner, name)
        except (ImportError, AttributeError):
            continue
        if not isinstance(function, _Uninterrupted):
            _entries[entry] = function
            setattr(owner, name, _Uninterrupted(entry))


class _KeepIgnored:
    """`signal.signal` without effect on SIGINT: vLLM sets its own handlers, for it and for SIGTERM."""

    def __init__(self, set_handler: Callable[..., Any]) -> None:
        self._set_handler = set_handler

    def __call__(self, number: int, handler: Any) -> Any:
        return signal.SIG_IGN if number == signal.SIGINT else self._set_handler(number, handler)
