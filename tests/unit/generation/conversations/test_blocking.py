"""Tools that block run in threads, and all others in the main thread, with ms-swift's real schedulers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from swift.infer_engine.protocol import ChatCompletionResponseChoice, ChatMessage, RolloutInferRequest
from swift.rollout.gym_env import Env, envs
from swift.rollout.multi_turn import GYMScheduler, MultiTurnScheduler, OpenEnvScheduler

from swift_megatron_grpo.generation.conversations.blocking import in_threads, run_blocking_tools_in_threads
from swift_megatron_grpo.generation.conversations.running import Conversations

MAIN = threading.main_thread()


def request(uuid: str) -> RolloutInferRequest:
    return RolloutInferRequest(messages=[{"role": "user", "content": "Hello."}], uuid=uuid)


class Place(Env):
    """An environment that knows in which thread it was called. Its `step` waits for that of the second conversation."""

    second = threading.Event()

    async def reset(self, config: Any) -> tuple[str, dict[str, Any], str]:
        self.threads = [threading.current_thread()]
        self.is_second = config.uuid == "b"
        return "Go.", {}, ""

    async def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        self.threads.append(threading.current_thread())
        if self.is_second:
            Place.second.set()
        return "On.", float(self.wait()), False, {}

    def wait(self) -> bool:
        return True

    async def close(self) -> None:
        self.threads.append(threading.current_thread())


class Blocking(Place):
    blocks = True

    def wait(self) -> bool:
        return Place.second.wait(timeout=20)


@pytest.fixture
def environments() -> Iterator[None]:
    Place.second.clear()
    envs.update(place=Place, blocking=Blocking)
    yield
    del envs["place"], envs["blocking"]


async def one_turn_each(scheduler: GYMScheduler) -> list[Place]:
    requests = [request(uuid) for uuid in "ab"]
    for one in requests:
        await scheduler.on_trajectory_start([one])
    message = ChatMessage(role="assistant", content="Here.")
    choice = ChatCompletionResponseChoice(index=0, message=message, finish_reason="stop", token_ids=[5])
    opened = list(scheduler._envs.values())
    results = await asyncio.gather(*(scheduler.on_turn_end(one, choice, 1) for one in requests))
    assert [result["rollout_infos"]["total_reward"] for result in results] == [1, 1]
    for uuid in "ab":
        await scheduler._close_and_remove(uuid)
    return opened


@pytest.mark.parametrize("name", ["place", "blocking"])
def test_a_blocking_step_lets_others_continue(environments: None, name: str) -> None:
    """The reward of the first conversation is 1 only if the step of the second one ran while its own waited."""
    scheduler = GYMScheduler(infer_engine=None, gym_env=name)
    Conversations(scheduler)
    opened = asyncio.run(one_turn_each(scheduler))
    threads = [thread for environment in opened for thread in environment.threads]
    assert all(isinstance(environment, envs[name]) for environment in opened)
    assert len(threads) == 6 and all((thread is MAIN) == (name == "place") for thread in threads)


def test_signals_work_in_tools_that_do_not_say_that_they_block() -> None:
    """In a thread, math_verify would grade every answer with 0."""
    scheduler = MultiTurnScheduler()
    hooks = scheduler.on_turn_end, scheduler.on_trajectory_start
    run_blocking_tools_in_threads(scheduler)
    assert (scheduler.on_turn_end, scheduler.on_trajectory_start) == hooks


class Replaced(OpenEnvScheduler):
    async def on_turn_end(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        return {"done": threading.current_thread() is MAIN}

    async def on_trajectory_start(self, requests: Any) -> None:
        self.started = threading.current_thread()


class SaysItBlocks(Replaced):
    blocks = True


@pytest.mark.parametrize(("kind", "in_main"), [(Replaced, True), (SaysItBlocks, False)])
def test_hooks_run_in_threads_if_their_scheduler_says_so(kind: type[Replaced], in_main: bool) -> None:
    scheduler = kind()
    run_blocking_tools_in_threads(scheduler)
    result = asyncio.run(scheduler.on_turn_end(None, None, 1))
    asyncio.run(scheduler.on_trajectory_start([]))
    assert result == {"done": in_main} and (scheduler.started is MAIN) == in_main


class Remote(OpenEnvScheduler):
    """An OpenEnv scheduler with ms-swift's hooks, and an environment without a server."""

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        return self

    def reset(self) -> tuple[str, None]:
        self.called = threading.current_thread()
        return "Go.", None


def test_ms_swifts_own_hooks_of_openenv_run_in_threads() -> None:
    scheduler = Remote()
    run_blocking_tools_in_threads(scheduler)
    asyncio.run(scheduler.on_trajectory_start([request("a")]))
    assert scheduler.called is not MAIN and list(scheduler._envs) == ["a"]


def test_an_error_in_a_thread_is_that_of_the_tool() -> None:
    async def fail() -> None:
        raise LookupError("the tool is not there")

    with pytest.raises(LookupError, match="the tool is not there"):
        asyncio.run(in_threads(fail)())


def test_a_tool_that_never_returns_can_be_left() -> None:
    ends = threading.Event()

    async def hang() -> None:
        ends.wait()

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(in_threads(hang)(), 0.05)

    asyncio.run(leave())
    [thread] = [thread for thread in threading.enumerate() if thread.name == "tool"]
    assert thread.daemon
    ends.set()
    thread.join(timeout=20)
    assert not thread.is_alive()


@pytest.mark.parametrize("seconds", [0.0, 0.1])  # with 0 it has not begun
def test_a_coroutine_in_a_thread_is_cancelled_with_its_caller(seconds: float) -> None:
    ended = threading.Event()

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def main() -> None:
        task = asyncio.create_task(in_threads(waits)())
        await asyncio.sleep(seconds)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended.wait(10)
