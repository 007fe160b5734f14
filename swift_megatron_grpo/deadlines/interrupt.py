"""Python code that takes too long is interrupted where it is: in a loop, in a sleep, in a read from a socket.

Not in a thread of its own that is given up on: reward functions use signal.alarm themselves (math_verify does), which
works in the main thread only, and a thread that is given up on goes on and keeps the process from ending.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNAL = signal.SIGRTMIN + 7  # SIGALRM belongs to the code that is interrupted
_AGAIN = 1.0  # seconds after which code that has caught TimeIsUp is interrupted once more


class TimeIsUp(BaseException):
    """Not an Exception: code that goes on after whatever exception must not go on after this one."""


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """TimeIsUp is raised in the block once the time is over, and at its end if the block has caught it.

    Only Python code can be interrupted, and only the main thread's: elsewhere nothing happens. The watchdog ends a
    process that this does not reach.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    over, late = threading.Event(), threading.Event()
    main = threading.get_ident()

    def wait() -> None:
        if over.wait(seconds):
            return
        late.set()
        while True:
            signal.pthread_kill(main, _SIGNAL)
            if over.wait(_AGAIN):
                return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if not over.is_set():
            raise TimeIsUp

    before = signal.signal(_SIGNAL, on_signal)
    waiting = threading.Thread(target=wait, name="time limit", daemon=True)
    waiting.start()
    try:
        yield
    finally:
        over.set()
        waiting.join()  # after this no signal comes any more
        signal.signal(_SIGNAL, before)
    if late.is_set():
        raise TimeIsUp
