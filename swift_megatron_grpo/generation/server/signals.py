"""SIGTERM and SIGINT end the server with all of its processes within seconds, and in order.

uvicorn alone would wait for requests in progress, which may take minutes, and handle no signal while the model loads.
Trainers retry unfinished requests on other servers. Ctrl-C reaches the web server alone: the engine process leads a
process group of its own, because a core of vLLM that ends first looks like a failure.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType

import psutil
import uvicorn

_REQUESTS_SECONDS = 1  # for requests in progress
_EXIT_SECONDS = 6.0  # for the engine to exit; then it is killed


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
            timer = threading.Timer(_EXIT_SECONDS, _end_now, [number])
            timer.daemon = True
            timer.start()
        else:
            _end_now(number)


def _end_now(number: int) -> None:
    kill_children()
    os._exit(128 + number)


def kill_children() -> None:
    """Kill every process that this one has started, and what those have started."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
