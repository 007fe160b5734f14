"""Signals are received at once, and by the process that they were sent to only."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from swift_megatron_grpo.runtime.stopping.request import last_line
from swift_megatron_grpo.runtime.stopping.signals import STOP_SIGNALS, StopSignals


@contextmanager
def received() -> Iterator[list[signal.Signals]]:
    numbers: list[signal.Signals] = []
    signals = StopSignals(numbers.append, lambda: None, interval=0.1)
    try:
        yield numbers
    finally:
        signals.close()


def wait_for(numbers: list[signal.Signals], count: int) -> None:
    end = time.monotonic() + 5
    while len(numbers) < count and time.monotonic() < end:
        time.sleep(0.01)


def test_every_signal_is_received_and_does_not_end_the_process() -> None:
    with received() as numbers:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
            wait_for(numbers, len(numbers) + 1)
    assert numbers == [signal.SIGTERM, signal.SIGINT, signal.SIGTERM]


def test_handlers_are_restored() -> None:
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    with received():
        assert [signal.getsignal(number) for number in STOP_SIGNALS] != handlers
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers
    assert signal.set_wakeup_fd(-1) == -1


def test_other_signals_are_ignored() -> None:
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    with received() as numbers:
        os.kill(os.getpid(), signal.SIGALRM)
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(numbers, 1)
    signal.signal(signal.SIGALRM, previous)
    assert numbers == [signal.SIGINT]


def test_ending_a_pool_of_forked_processes_does_not_stop_the_run() -> None:
    """Reward functions use such pools; terminate() sends SIGTERM to processes that share this one's pipe."""
    with received() as numbers:
        children = [multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)) for _ in range(2)]
        for child in children:
            child.start()
            child.terminate()
            child.join(5)
        time.sleep(0.3)
    assert [child.exitcode for child in children] == [-signal.SIGTERM] * 2
    assert numbers == []


@pytest.mark.parametrize(
    ("checkpoint", "has_adapter", "has_optimizer", "expected"),
    [
        ("out/checkpoint-7", False, True, "use the same command with --finetune false --mcore_model out/checkpoint-7"),
        ("out/checkpoint-7", True, True, "use the same command with --finetune false --mcore_adapter out/checkpoint-7"),
        ("out/checkpoint-7", False, False, "start a new run from them, use the same command with --model out/check"),
        ("out/checkpoint-7", True, False, "start a new run from them, use the same command with --adapters out/check"),
        (None, False, True, "nothing was saved"),
    ],
)
def test_the_last_line_has_the_flags_that_continue_the_run(
    checkpoint: str | None, has_adapter: bool, has_optimizer: bool, expected: str
) -> None:
    line = last_line(signal.SIGTERM, 7, 9, checkpoint, has_adapter, has_optimizer)
    assert line.startswith("stopped by SIGTERM after step 7 of 9; ") and expected in line
