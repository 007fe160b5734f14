"""An engine is stuck if it generates nothing for the whole timeout, although requests are waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from swift_megatron_grpo.generation.server.health import EngineHealth

pytestmark = pytest.mark.alone
TIMEOUT = 0.8


def observe(
    probe: Callable[[], Awaitable[object]], act: Callable[[EngineHealth], Awaitable[None]]
) -> tuple[str, float]:
    """Observe an engine until it is stuck. Return the reason, and the time since `act` returned."""

    async def scenario() -> tuple[str, float]:
        health = EngineHealth(probe, TIMEOUT)
        observing = asyncio.create_task(health.wait_until_stuck())
        await act(health)
        assert not observing.done(), observing.result()
        began = time.monotonic()
        return await observing, time.monotonic() - began

    return asyncio.run(scenario())


async def never() -> None:
    await asyncio.Event().wait()


async def nothing(_: EngineHealth) -> None: ...


def test_an_engine_that_does_not_answer_is_stuck_within_the_timeout() -> None:
    reason, seconds = observe(never, nothing)
    assert "has generated no token for" in reason and "--health_timeout" in reason
    assert TIMEOUT / 2 < seconds < TIMEOUT * 1.5


def test_an_engine_that_fails_to_generate_is_stuck_and_the_reason_is_shown() -> None:
    async def fail() -> None:
        raise RuntimeError("out of blocks")

    assert "the last attempt failed: out of blocks" in observe(fail, nothing)[0]


def test_an_idle_engine_that_answers_is_healthy() -> None:
    """Few tokens are requested of it, and none while real requests are completed."""
    probes: list[float] = []

    async def answer() -> None:
        if len(probes) >= 4:
            await never()
        probes.append(time.monotonic())

    async def act(health: EngineHealth) -> None:
        for _ in range(30):  # 1.5 s, longer than the timeout
            await asyncio.sleep(0.05)
            health.record_token()
        assert len(probes) <= 1
        await asyncio.sleep(TIMEOUT)
        assert 2 <= len(probes) <= 4

    observe(answer, act)


def test_an_engine_that_receives_weights_is_not_stuck() -> None:
    async def act(health: EngineHealth) -> None:
        with health.suspended():
            await asyncio.sleep(2 * TIMEOUT)

    _, seconds = observe(never, act)
    assert seconds > TIMEOUT / 2  # counted from the end of the transfer


def test_time_in_which_this_process_was_stopped_does_not_count() -> None:
    """`observe` fails if the engine counts as stuck while `act` runs; after it, some of the timeout must be left."""

    async def act(health: EngineHealth) -> None:
        health.record_token()
        await asyncio.sleep(TIMEOUT / 4)
        time.sleep(2 * TIMEOUT)  # the event loop stands still, as under SIGSTOP
        await asyncio.sleep(TIMEOUT / 4)

    reason, seconds = observe(never, act)
    assert "no token" in reason and seconds > TIMEOUT / 4
