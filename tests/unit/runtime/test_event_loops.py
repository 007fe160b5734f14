"""A task of a user's code that calls sys.exit() fails like any other, and its event loop continues."""

from __future__ import annotations

import asyncio
import sys
from contextlib import closing
from typing import Any

import pytest

from swift_megatron_grpo.runtime.event_loops import run_to_end


def run(work: Any) -> Any:
    with closing(asyncio.new_event_loop()) as loop:
        return run_to_end(loop, work)


async def leave(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


@pytest.mark.parametrize("error", [SystemExit(0), ValueError("bad")])
def test_whoever_awaits_a_task_receives_what_it_raised_and_others_go_on(error: BaseException) -> None:
    async def work() -> list[Any]:
        return await asyncio.gather(leave(error), asyncio.sleep(0.05, "slept"), leave(error), return_exceptions=True)

    assert run(work()) == [error, "slept", error]


def test_a_task_that_nobody_awaits_does_not_end_the_work() -> None:
    async def work() -> str:
        tasks = [asyncio.create_task(leave(SystemExit(0))) for _ in range(3)]
        await asyncio.wait(tasks)
        return "done"

    assert run(work()) == "done"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError("bad")])
def test_what_the_work_itself_raises_is_raised(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised:
        run(leave(error))
    assert raised.value is error


def test_the_cleanup_of_the_work_runs_where_a_task_leaves() -> None:
    """Other ranks wait for what a rank sends them there."""
    cleaned = []

    async def work() -> None:
        try:
            await asyncio.gather(asyncio.to_thread(sys.exit, "in a thread"), leave(SystemExit("in a task")))
        finally:
            cleaned.append(True)

    with pytest.raises(SystemExit):
        run(work())
    assert cleaned == [True]
