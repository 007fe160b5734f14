"""The end of a stopped run: its last line states what was saved and how to continue."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from signal import Signals

from swift_megatron_grpo.runtime.stopping.request import StopRequest


class StoppedBySignal(Exception):
    """The run has saved its checkpoint and released its resources. Every rank raises this."""

    def __init__(self, request: StopRequest, number: Signals, line: str) -> None:
        super().__init__(line)
        self.request, self.number, self.line = request, number, line


def last_line(
    number: Signals,
    step: int,
    steps: int,
    checkpoint: str | None,
    has_adapter: bool,
    has_optimizer: bool,
    finds_checkpoint: bool = False,
) -> str:
    """Return the last line of a stopped run. `checkpoint`: of the last complete step; None: nothing was saved.

    `finds_checkpoint`: True if the same command continues (--resume auto).
    """
    stopped = f"stopped by {number.name} after step {step} of {steps}"
    if checkpoint is None:
        return f"{stopped}; nothing was saved, because no weights have changed. To continue, start the run again"
    if not has_optimizer:
        flag = "--adapters" if has_adapter else "--model"
        return (
            f"{stopped}; the weights are in {checkpoint}, without the optimizer's state (--no_save_optim true). To "
            f"start a new run from them, use the same command with {flag} {checkpoint}"
        )
    if finds_checkpoint:
        return f"{stopped}; the checkpoint is {checkpoint}. To continue, use the same command again"
    flag = "--mcore_adapter" if has_adapter else "--mcore_model"
    return (
        f"{stopped}; the checkpoint is {checkpoint}. To continue, use the same command with --finetune false {flag} "
        f"{checkpoint}"
    )


@contextmanager
def exit_if_stopped() -> Iterator[None]:
    """Around a whole run: if a signal has stopped it, print the last line and exit with 128 + the signal."""
    try:
        yield
    except StoppedBySignal as stopped:
        atexit._run_exitfuncs()  # of trackers; the rest of Python's exit waits for threads, and libraries print in it
        sys.stdout.flush()
        sys.stderr.flush()
        line = f"swift_megatron_grpo: {stopped.line}"
        stopped.request.leave_together(lambda: print(line, file=sys.stderr, flush=True))
        os._exit(128 + stopped.number)
