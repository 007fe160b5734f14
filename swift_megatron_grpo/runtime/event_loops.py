"""Runs an event loop to the end of its work, also where a task of a user's code calls sys.exit().

asyncio leaves its loop when a task raises SystemExit, so that a process that trains nothing ends with exit code 0, and
other ranks wait for it. Here that task fails, as with any other exception, and whoever awaits it receives what it
raised.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def run_to_end(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Return what the work returns, or raise what it raises."""
    task = loop.create_task(work)
    while not task.done():
        with suppress(SystemExit):
            loop.run_until_complete(task)
    return task.result()
