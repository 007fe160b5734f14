"""A reward function that times out is named, whatever blocks it; functions that return in time are not affected."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from swift_megatron_grpo.grading.rewards import RewardError, call_reward_functions
from swift_megatron_grpo.runtime.deadlines.interrupt import interrupted_after
from tests.unit.grading.test_rewards import functions, length, make_rollouts

SECONDS = 0.5


@contextmanager
def limit(what: str) -> Iterator[float]:
    with interrupted_after(SECONDS):
        yield SECONDS


def sleeps(completions: list[str], **kwargs: Any) -> list[float]:
    time.sleep(60)
    return [0.0] * len(completions)


def catches_every_exception(completions: list[str], **kwargs: Any) -> list[float]:
    for _ in completions:
        with suppress(Exception):
            time.sleep(60)
    return [0.0] * len(completions)


async def awaits(completions: list[str], **kwargs: Any) -> list[float]:
    await asyncio.sleep(60)
    return [0.0] * len(completions)


async def blocks(completions: list[str], **kwargs: Any) -> list[float]:
    time.sleep(60)
    return [0.0] * len(completions)


async def in_time(completions: list[str], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0.01)
    return [1.0] * len(completions)


async def raises_timeout(completions: list[str], **kwargs: Any) -> list[float]:
    raise TimeoutError("the judge did not answer")


def times_itself(completions: list[str], **kwargs: Any) -> list[float]:
    """Limit its own time with SIGALRM, as math_verify does; this works in the main thread only."""

    def too_late(*_: Any) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        time.sleep(60)
    except TimeoutError:
        return [0.25] * len(completions)
    finally:
        signal.signal(signal.SIGALRM, previous)
    return []


@pytest.mark.alone
@pytest.mark.parametrize(
    ("called", "name"),
    [
        ([length, sleeps], "sleeps"),
        ([catches_every_exception], "catches_every_exception"),
        ([in_time, awaits], "(in_time or )?awaits"),
        ([length, blocks], "blocks"),
        ([in_time, blocks], "in_time or blocks"),
    ],
)
def test_the_function_that_times_out_is_named(called: list[Callable[..., Any]], name: str) -> None:
    began = time.monotonic()
    with pytest.raises(
        RewardError, match=rf"reward function {name} has not returned after \d\.\d s \(--reward_timeout\)"
    ):
        call_reward_functions(make_rollouts(["a", "bb"]), functions(*called), None, limit)
    assert time.monotonic() - began < 5


@pytest.mark.alone
def test_functions_that_return_in_time_are_not_interrupted() -> None:
    rollouts = make_rollouts(["a", "bb"])
    assert call_reward_functions(rollouts, functions(length, times_itself, in_time), None, limit) == [
        [1, 0.25, 1],
        [2, 0.25, 1],
    ]


def test_a_timeout_error_of_the_function_itself_is_reported_as_such() -> None:
    with pytest.raises(RewardError, match="raises_timeout raised TimeoutError: the judge did not answer"):
        call_reward_functions(make_rollouts(["a"]), functions(raises_timeout), None, limit)
