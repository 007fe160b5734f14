"""Conversations: checks and clean-up around ms-swift's real schedulers, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from typing import Any

import numpy as np
import pytest
from swift.infer_engine.protocol import (
    ChatCompletionResponseChoice,
    ChatMessage,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
)
from swift.rollout.gym_env import Env, envs
from swift.rollout.multi_turn import GYMScheduler, MultiTurnScheduler
from swift.template import MaxLengthError

from swift_megatron_grpo.generation.conversations.running import (
    Conversations,
    NoRoom,
    TurnRecorder,
    empty_response,
    end_without_room,
    finish,
    has_room,
)
from swift_megatron_grpo.generation.conversations.turns import Turn
from swift_megatron_grpo.generation.interface import Request, requests_for
from swift_megatron_grpo.generation.protocol.messages import InvalidRequest
from swift_megatron_grpo.generation.requests import conversation_payload
from swift_megatron_grpo.types import Prompt
from tests.unit.generation.conversations.answering import Engine

REQUEST = {"messages": [{"role": "user", "content": "Hello."}], "uuid": "a"}


def request() -> RolloutInferRequest:
    return RolloutInferRequest(**REQUEST)


def unanswered() -> RolloutOutput:
    messages = [*REQUEST["messages"], {"role": "assistant", "content": [5]}, {"role": "user", "content": "And?"},
                {"role": "assistant", "content": ""}]  # fmt: skip
    return RolloutOutput(response=empty_response(request()), messages=messages, response_token_ids=[[5]])


def test_a_request_contains_all_columns_and_a_unique_name() -> None:
    row = {"messages": [*REQUEST["messages"], {"role": "assistant", "content": "Hi."}], "solution": np.float32(2)}
    payloads = [conversation_payload(request) for request in requests_for([Prompt("0-7", row)], 2, None, 0)]
    assert [payload["uuid"] for payload in payloads] == ["0-7-0", "0-7-1"]
    assert payloads[0]["messages"] == REQUEST["messages"] and payloads[0]["data_dict"] == {"solution": "2.0"}
    with pytest.raises(ValueError, match=r"the column when of prompt 0-7 must be .* is of type date"):
        conversation_payload(Request(0, Prompt("0-7", {**row, "when": date(2026, 1, 2)}), seed=None))


class FixedOutput(MultiTurnScheduler):
    """A scheduler that overrides `run`."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    async def run(self, infer_request: Any, request_config: Any, **_: Any) -> Any:
        return self._output


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        ([], "returned 0 outputs without turns"),
        (unanswered(), r"without turns, because it never called infer_engine\.infer_async"),
    ],
)
def test_an_output_that_cannot_be_trained_on_is_refused(output: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        asyncio.run(Conversations(FixedOutput(output)).complete(request(), RequestConfig(), None))


class Door(Env):
    """An environment that counts how often it is closed."""

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

    async def run_conversation() -> None:
        with pytest.raises(AttributeError, match="infer_async"):
            await Conversations(scheduler).complete(request(), RequestConfig(), None)
        await asyncio.sleep(0.1)

    asyncio.run(run_conversation())
    assert Door.closed == 1 and not scheduler._envs


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()])
def test_a_tool_that_would_end_the_process_or_looks_cancelled_is_a_failure(
    error: BaseException, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leaves(Door):
        async def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
            raise error

    monkeypatch.setattr(Leaves, "blocks", blocks, raising=False)
    monkeypatch.setitem(envs, "leaves", Leaves)

    async def main() -> None:
        engine = Engine()
        conversations = Conversations(GYMScheduler(infer_engine=engine, gym_env="leaves", tokenizer=engine))
        with pytest.raises(RuntimeError, match=f"GYMScheduler, or its tool, raised {type(error).__name__}"):
            await conversations.complete(request(), RequestConfig(logprobs=True), None)

    asyncio.run(main())


def test_a_repeated_conversation_begins_once_the_first_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """ms-swift removes rewards and observations by uuid after a slow close, also those of the second one."""

    class Steps(Env):
        async def reset(self, config: Any) -> tuple[str, dict[str, Any], str]:
            self.steps = 0
            return "Begin.", {}, ""

        async def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
            await asyncio.sleep(0.1)
            self.steps += 1
            return "Go on.", 1.0, self.steps == 3, {}

        async def close(self) -> None:
            await asyncio.sleep(0.15)

    monkeypatch.setitem(envs, "steps", Steps)

    async def main() -> Any:
        engine = Engine()
        conversations = Conversations(GYMScheduler(infer_engine=engine, gym_env="steps", tokenizer=engine))
        engine.go.clear()
        first = asyncio.create_task(conversations.complete(request(), RequestConfig(max_tokens=9), None))
        while not engine.sampling:
            await asyncio.sleep(0)
        second = asyncio.create_task(conversations.complete(request(), RequestConfig(max_tokens=9), None))
        await asyncio.wait([first])
        engine.go.set()
        completion = await second
        await asyncio.wait(conversations.closing.values())
        assert first.cancelled() and not conversations.closing
        return completion

    completion = asyncio.run(main())
    assert completion.infos["total_reward"] == 3.0
    assert [each["content"] for each in completion.messages if each["role"] == "user"] == ["Begin."] + ["Go on."] * 2


def test_a_conversation_without_room_ends_against_the_schedulers_will() -> None:
    scheduler = FixedOutput(None)

    async def continue_always(*_: Any) -> dict[str, Any]:
        return {"done": False}

    scheduler.on_turn_end = continue_always
    end_without_room(scheduler)
    [choice] = empty_response(request()).choices
    assert asyncio.run(scheduler.on_turn_end(request(), choice, 2))["done"]
    assert has_room(255, 0, 256) and not has_room(256, 0, 256)


def test_an_unanswered_last_message_is_dropped() -> None:
    finished = finish([unanswered()], [Turn([1, 2], [5], [-0.5])], decode=str)
    assert [message["content"] for message in finished.messages] == ["Hello.", "[5]"]
    assert finished.finish_reason == "length" and finished.infos == {"num_turns": 1}
    assert finished.completion_ids == [5]


def test_several_outputs_are_trained_in_their_own_contexts() -> None:
    question = {"role": "user", "content": "?"}
    answers = []
    for text in ("one", "two"):
        response = replace(empty_response(request()), choices=[answered(text)])
        messages = [question, {"role": "assistant", "content": text}]
        answers.append(RolloutOutput(response=response, messages=messages))
    experts = np.zeros((4, 1, 2), np.uint8)
    finished = finish(answers, [Turn([1, 2], [5, 6], [-0.5, -1]), Turn([1, 2, 5, 9], [7], [-2.0], experts)], str)
    [earlier] = finished.earlier
    assert (earlier.prompt_ids, earlier.completion_ids, earlier.logprobs) == ([1, 2], [5, 6], [-0.5, -1])
    assert (finished.prompt_ids, finished.completion_ids, finished.logprobs) == ([1, 2, 5, 9], [7], [-2.0])
    assert finished.routed_experts is experts
    assert finished.infos == {"num_turns": 2} and finished.text == "two"


def answered(text: str) -> ChatCompletionResponseChoice:
    message = ChatMessage(role="assistant", content=text)
    return ChatCompletionResponseChoice(index=0, message=message, finish_reason="stop", token_ids=[])


def turn(recorder: TurnRecorder, error: Exception) -> Any:
    async def infer(config: RequestConfig) -> Any:
        raise error

    return asyncio.run(recorder.generate(request(), RequestConfig(), infer, frozenset()))


@pytest.mark.parametrize("column", ["audios", "videos"])
def test_a_scheduler_that_adds_other_media_than_images_is_refused(column: str) -> None:
    """The trainer learns of added images alone, from rollout_infos."""
    recorder = TurnRecorder(RequestConfig(), None, ["of the row"])

    async def generate(**media: list[str]) -> None:
        async def infer(config: RequestConfig) -> Any:
            raise NoRoom

        await recorder.generate(RolloutInferRequest(**REQUEST, **media), RequestConfig(), infer, frozenset())

    for kept in (["of the row"], []):
        with pytest.raises(InvalidRequest, match="no room"):  # it reaches the engine
            asyncio.run(generate(**{column: kept}, images=["another"]))
    with pytest.raises(InvalidRequest, match="it can add images alone"):
        asyncio.run(generate(**{column: ["of the row", "another"]}))


@pytest.mark.parametrize(("own", "expected"), [(4, 4), (8, 7), (None, 7)])
def test_a_turn_has_its_own_limit_within_that_of_all_turns(own: int | None, expected: int) -> None:
    recorder, limits = TurnRecorder(RequestConfig(), 9), list[int | None]()
    recorder.recorded.append(Turn([1], [2, 3], [-0.5, -0.5]))

    async def infer(config: RequestConfig) -> Any:
        limits.append(config.max_tokens)
        raise NoRoom

    asyncio.run(recorder.generate(request(), RequestConfig(max_tokens=own), infer, frozenset()))
    assert limits == [expected]


@pytest.mark.parametrize(
    ("error", "flag"), [(NoRoom(), "--vllm_max_model_len"), (MaxLengthError("row(9) is larger"), "--max_length")]
)
def test_a_later_turn_without_room_ends_the_conversation(error: Exception, flag: str) -> None:
    with pytest.raises(InvalidRequest, match=f"the first prompt leaves no room .* larger {flag}"):
        turn(TurnRecorder(RequestConfig(), None), error)
    recorder = TurnRecorder(RequestConfig(), None)
    first = Turn([1], [2], [-0.5])
    recorder.recorded.append(first)
    response = turn(recorder, error)
    assert response.choices[0].message.content == "" and recorder.recorded == [first]
    with pytest.raises(RuntimeError, match="has no room left"):
        turn(recorder, error)
