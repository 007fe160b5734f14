"""What of ms-swift's schedulers a server checks and cleans up, with ms-swift's own schedulers and no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import date
from typing import Any

import numpy as np
import pytest
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest, RolloutOutput
from swift.rollout.gym_env import Env, envs
from swift.rollout.multi_turn import GYMScheduler, MultiTurnScheduler

from swift_megatron_grpo.conversations.scheduling import end_without_room, finish, has_room, no_answer
from swift_megatron_grpo.conversations.turns import Turn
from swift_megatron_grpo.generation.interface import Request
from swift_megatron_grpo.generation.requests import conversation_in_words
from swift_megatron_grpo.server.conversations import Conversations
from swift_megatron_grpo.types import Prompt

REQUEST = {"messages": [{"role": "user", "content": "Hello."}], "uuid": "a"}


def request() -> RolloutInferRequest:
    return RolloutInferRequest(**REQUEST)


def unanswered() -> RolloutOutput:
    messages = [*REQUEST["messages"], {"role": "assistant", "content": [5]}, {"role": "user", "content": "And?"},
                {"role": "assistant", "content": ""}]  # fmt: skip
    return RolloutOutput(response=no_answer(request()), messages=messages, response_token_ids=[[5]])


def test_a_server_is_told_all_columns_and_one_name_for_each_conversation() -> None:
    row = {"messages": [*REQUEST["messages"], {"role": "assistant", "content": "Hi."}], "solution": np.float32(2)}
    told = [conversation_in_words(Request(index, Prompt("0-7", row), seed=None)) for index in (4, 5)]
    assert [each["uuid"] for each in told] == ["0-7-4", "0-7-5"]
    assert told[0]["messages"] == REQUEST["messages"] and told[0]["data_dict"] == {"solution": 2.0}
    with pytest.raises(ValueError, match=r"the dataset's column when must be .* is of type date"):
        conversation_in_words(Request(0, Prompt("0-7", {**row, "when": date(2026, 1, 2)}), seed=None))


class Says(MultiTurnScheduler):
    """A scheduler with a `run` of its own."""

    def __init__(self, said: Any) -> None:
        super().__init__()
        self._said = said

    async def run(self, infer_request: Any, request_config: Any, **_: Any) -> Any:
        return self._said


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ([unanswered(), unanswered()], "returned 2 outputs for one request"),
        ([], "returned 0 outputs"),
        (unanswered(), r"without turns, because it has not asked infer_engine\.infer_async"),
    ],
)
def test_a_run_that_cannot_be_trained_on(said: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        asyncio.run(Conversations(Says(said)).lead(request(), RequestConfig()))


class Door(Env):
    closed = 0

    async def reset(self, config: Any) -> tuple[str, dict[str, Any], str]:
        return "Knock.", {}, ""

    async def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        raise AssertionError("there is no engine, so no turn")

    async def close(self) -> None:
        Door.closed += 1


@pytest.fixture
def doors() -> Iterator[None]:
    envs["door"] = Door
    Door.closed = 0
    yield
    del envs["door"]


def test_a_conversation_that_fails_closes_its_environment(doors: None) -> None:
    scheduler = GYMScheduler(infer_engine=None, gym_env="door")

    async def lead() -> None:
        with pytest.raises(AttributeError, match="infer_async"):
            await Conversations(scheduler).lead(request(), RequestConfig())
        await asyncio.sleep(0.1)

    asyncio.run(lead())
    assert Door.closed == 1 and not scheduler._envs


def test_without_room_it_ends_whatever_the_scheduler_wants() -> None:
    scheduler = Says(None)

    async def goes_on(*_: Any) -> dict[str, Any]:
        return {"done": False}

    scheduler.on_turn_end = goes_on
    end_without_room(scheduler)
    [choice] = no_answer(request()).choices
    assert asyncio.run(scheduler.on_turn_end(request(), choice, 2))["done"]
    assert has_room(255, 0, 256) and not has_room(256, 0, 256)


def test_the_question_without_an_answer_is_no_part_of_it() -> None:
    told = finish(unanswered(), [Turn([1, 2], [5], [-0.5])], decode=str)
    assert [message["content"] for message in told.messages] == ["Hello.", "[5]"]
    assert told.finish_reason == "length" and told.infos == {"num_turns": 1}
    assert told.conversation.completion_ids == [5]
