"""Ends the helper processes of checkpoint writing with their rank.

Upstream: megatron-core 0.16.1 to 0.19.2 starts a multiprocessing manager at the first checkpoint with distributed
state, for the queue of its writers' results, and 0.16.1 forks its writers for every checkpoint. Neither notices when
its rank is killed. The manager and multiprocessing's resource tracker stay for ever; so does a writer that waits for a
lock of a queue which its killed rank held. A writer is a copy of its rank, with all of its sockets.

Fix: start the same manager with a thread that ends it with its rank, and such a thread in each writer. Results pass
through the manager pickled: it would import torch to read them, for 3 s and hundreds of MB per rank.

Tests: tests/unit/training/upstream_fixes/test_result_queue.py fails once upstream ends them; then delete this file.
"""

import multiprocessing
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from multiprocessing.managers import SyncManager
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from swift_megatron_grpo.runtime.stopping.signals import exit_with_parent

# With --async_save the first of a version runs in a forked process, too. megatron-core 0.16.1 forks the others from it;
# newer versions have the second in place of the first, and write in threads.
_IN_WRITERS = ("write_preloaded_data_multiproc", "write_preloaded_data_multithread", "write_preloaded_data")


def end_writers_with_rank() -> None:
    """Start the manager of the result queue, unless it is running, and let it and all writers end with this process."""
    for name in _IN_WRITERS:
        function = getattr(FileSystemWriterAsync, name, None)  # None: this version has not got it
        if function is not None and function.__module__ != __name__:
            setattr(FileSystemWriterAsync, name, staticmethod(_ending_with_parent(function)))
    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
        manager.start(exit_with_parent, (os.getpid(),))
        filesystem_async._results_queue = _PickledQueue(manager.Queue())


@dataclass(frozen=True)
class _PickledQueue:
    """A manager's queue, as far as Megatron uses it. Both ends are processes of this rank."""

    queue: Any  # the manager's

    def put(self, item: object) -> None:
        self.queue.put(pickle.dumps(item))

    def get(self) -> Any:
        return pickle.loads(self.queue.get())

    def get_nowait(self) -> Any:
        return pickle.loads(self.queue.get_nowait())


def _ending_with_parent(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid is not None:  # None: this is the rank itself
            exit_with_parent(parent.pid)
        return function(*args, **kwargs)

    call.__module__ = __name__
    return call
