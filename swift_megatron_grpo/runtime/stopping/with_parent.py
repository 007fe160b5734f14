"""Ends a helper process with the rank that started it, also if the rank was killed."""

from __future__ import annotations

import os
import threading
import time

_POLL_SECONDS = 0.5


def exit_with_parent(parent: int) -> None:
    """Exit soon after process `parent` has ended. Call this in its child.

    A thread polls. The kernel's own way, PR_SET_PDEATHSIG, would end the child with the thread that started it.
    """
    threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(1)
