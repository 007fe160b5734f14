"""SIGTERM and SIGINT end the server with all of its processes within seconds, and in order.

uvicorn alone would wait for requests in progress, which may take minutes, and handle no signal while the model loads.
Trainers retry unfinished requests on other servers. Ctrl-C reaches the web server alone: the engine process leads a
process group of its own, because a core of vLLM that ends first looks like a failure.
"""

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
    pid = os.getpid()
    received: list[signal.Signals] = []
    serving: list[uvicorn.Server] = []

    def capture_signals(server: uvicorn.Server) -> AbstractContextManager[None]:
        """Replace uvicorn's own handling of signals."""
        serving.append(server)
        return nullcontext()

    def on_signal(number: int, _: FrameType | None) -> None:
        if os.getpid() != pid:  # a forked child, for which the default holds
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        received.append(signal.Signals(number))
        if len(received) == 1:
            line = f"the rollout server received {received[0].name} and ends, with all of its processes"
            print(f"swift_megatron_grpo: {line}", file=sys.stderr, flush=True)
        if len(received) > 1 or not any(server.started for server in serving):
            _end_now(number)
        for server in serving:
            server.config.timeout_graceful_shutdown = _REQUESTS_SECONDS
            server.should_exit = True
        timer = threading.Timer(_EXIT_SECONDS, _end_now, [number])
        timer.daemon = True
        timer.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    uvicorn.Server.capture_signals = capture_signals  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if received:  # also if the engine's end was noticed first
            raise SystemExit(128 + received[-1])


def _end_now(number: int) -> None:
    kill_children()
    os._exit(128 + number)


def kill_children() -> None:
    """Kill every process that this one has started, and what those have started."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
