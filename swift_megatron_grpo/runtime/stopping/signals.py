"""Receives SIGTERM and SIGINT at once, even while the main thread waits in a collective or in other C code.

A signal handler in Python runs only when the main thread returns to the interpreter. The interpreter's own handler, in
C, writes the signal's number to a pipe in any case (signal.set_wakeup_fd), and a thread reads it.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_POLL_SECONDS = 0.5  # between two looks at the parent


class StopSignals:
    """A thread that calls `on_signal` for every SIGTERM and SIGINT, and `on_idle` every `interval` seconds."""

    def __init__(
        self, on_signal: Callable[[signal.Signals], None], on_idle: Callable[[], None], interval: float
    ) -> None:
        """Replace the handlers of the two signals. Call this in the main thread."""
        self._on_signal, self._on_idle, self._interval = on_signal, on_idle, interval
        self._closing = threading.Event()
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._handlers = {number: signal.signal(number, _do_nothing) for number in STOP_SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._mask = threading.local()  # of the thread that forks
        os.register_at_fork(before=self._block, after_in_parent=self._unblock, after_in_child=self._in_child)
        self._thread = threading.Thread(target=self._run, name="stop signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Restore the handlers. Call this in the main thread."""
        if self._closing.is_set():
            return
        self._closing.set()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.write(self._write, b"\0")
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            if not select.select([self._read], [], [], self._interval)[0]:
                self._on_idle()
                continue
            for number in os.read(self._read, 4096):
                if number in STOP_SIGNALS:  # the pipe carries all signals that have a handler in Python
                    self._on_signal(signal.Signals(number))

    # ---- around every fork: a child has this process's handlers and pipe at first, but its signals are its own

    def _block(self) -> None:
        self._mask.previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.previous)

    def _in_child(self) -> None:
        """Give forked children the default behaviour: a pool of processes ends its workers with SIGTERM."""
        if not self._closing.is_set():
            self._closing.set()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._unblock()


def _do_nothing(number: int, frame: FrameType | None) -> None: ...


def exit_with_parent(parent: int) -> None:
    """Exit soon after process `parent` has ended, also if it was killed. Call this in a helper process that it started.

    A thread polls. The kernel's own way, PR_SET_PDEATHSIG, would end the child with the thread that started it.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
