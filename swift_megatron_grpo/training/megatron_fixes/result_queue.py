"""Ends the helper process of checkpoint writing with its rank.

Upstream: megatron-core (0.16.1 to 0.19.2) starts a multiprocessing manager at the first checkpoint with distributed
state, for the queue of its writers' results. The manager does not notice when its rank is killed: it and
multiprocessing's resource tracker stay for ever, with the log file of the run open.

Fix: start the same manager with a thread that ends it with its rank.

Tests: tests/unit/training/megatron_fixes/test_result_queue.py fails once upstream ends it; then delete this file.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.managers import SyncManager

from megatron.core.dist_checkpointing.strategies import filesystem_async

from swift_megatron_grpo.stopping.with_parent import exit_with_parent


def end_result_queue_with_rank() -> None:
    """Start the manager of the result queue, unless it is running, such that it ends with this process."""
    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
        manager.start(exit_with_parent, (os.getpid(),))
        filesystem_async._results_queue = manager.Queue()
