"""A timeout for Python code in the main thread: a signal interrupts a loop, a sleep or a read from a socket.

The code does not run in a separate thread that is abandoned after the timeout: reward functions use signal.alarm
themselves (math_verify does), which works in the main thread only, and an abandoned thread would continue and keep the
process from exiting.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNAL = signal.SIGRTMIN + 7  # not SIGALRM, which the interrupted code may use itself
_POLL_SECONDS = 0.5  # between two calls of `give_up`
_REPEAT_SECONDS = 1.0  # after this time, code that has caught DeadlineExceeded is interrupted again


class DeadlineExceeded(BaseException):
    """A timeout. A BaseException, because code that catches every Exception and continues must not catch this."""


@contextmanager
def interrupted_after(seconds: float | None, give_up: Callable[[], bool] | None = None) -> Iterator[None]:
    """Raise DeadlineExceeded in the block after `seconds`, and at its end if the block has caught it.

    With `give_up`, raise it also as soon as that function, which a thread calls, returns True. None for `seconds`: no
    limit. Only Python code in the main thread can be interrupted; in other threads this has no effect. The watchdog
    ends a process that cannot be interrupted this way.
    """
    unlimited = seconds is None and give_up is None
    if unlimited or threading.current_thread() is not threading.main_thread():
        yield
        return
    finished, expired = threading.Event(), threading.Event()
    main = threading.get_ident()
    end = float("inf") if seconds is None else time.monotonic() + seconds

    def wait() -> None:
        while (left := end - time.monotonic()) > 0 and not (give_up is not None and give_up()):
            if finished.wait(min(left, _POLL_SECONDS)):
                return
        expired.set()
        while True:
            signal.pthread_kill(main, _SIGNAL)
            if finished.wait(_REPEAT_SECONDS):
                return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if not finished.is_set():
            raise DeadlineExceeded

    previous = signal.signal(_SIGNAL, on_signal)
    timer = threading.Thread(target=wait, name="time limit", daemon=True)
    timer.start()
    try:
        yield
    finally:
        finished.set()
        timer.join()  # no signal is sent after this
        signal.signal(_SIGNAL, previous)
    if expired.is_set():
        raise DeadlineExceeded
