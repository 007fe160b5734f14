"""Agents and the address that they call: real connections and SDKs, with an engine that gives fixed answers."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from threading import Barrier, Event
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest
from swift.rollout import multi_turns

from swift_megatron_grpo.generation.conversations import agents, chat
from swift_megatron_grpo.generation.conversations.agents import AgentRollout, register_agent
from swift_megatron_grpo.generation.conversations.running import Conversations, NoRoom, TurnRecorder
from swift_megatron_grpo.types import AGENT_ERROR
from tests.unit.generation.conversations.answering import ADD, USER, Engine, complete, run

TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
RELEASED = Event()  # lets the agent that hangs end after its test


def client_of(url: str, key: str) -> OpenAI:
    return OpenAI(base_url=url, api_key=key, max_retries=0, timeout=15)


def test_an_agent_is_trained_on_every_context_of_its_calls() -> None:
    async def agent(row: dict[str, Any], url: str, key: str) -> float:
        client = client_of(url, key)
        assert row == {"number": 0, "messages": [USER]}
        first = client.chat.completions.create(model="m", messages=row["messages"])
        assert first.choices[0].message.content == "answer 1" and first.usage is not None
        assert first.model == "m" and first.usage.total_tokens == 2 and first.choices[0].finish_reason == "stop"
        messages = [USER, first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Sure?"}]
        second = client.chat.completions.create(model="m", messages=messages, max_tokens=3, stop=["."])
        assert second.choices[0].message.content == "answer 2"
        with client.chat.completions.create(model="m", messages=[USER] * 3, stream=True) as stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == "answer 3"
        return 0.5

    engine, [completion] = run(Engine, agent)
    [earlier] = completion.earlier
    assert (earlier.prompt_ids, earlier.completion_ids, earlier.sampled) == ([4], [101, 5, 102], [True, False, True])
    assert (completion.prompt_ids, completion.completion_ids) == ([4, 4, 4], [103])
    assert completion.infos == {"total_reward": 0.5, "num_turns": 3} and completion.text == "answer 3"
    assert engine.requests[1].messages[1] == {"role": "assistant", "content": [101]}  # by its tokens
    assert [each.max_tokens for each in engine.sampling] == [9, 3, 9] and engine.sampling[1].stop == ["."]
    assert len({each.seed for each in engine.sampling}) == 3 and not any(each.temperature for each in engine.sampling)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_is_sent_back_by_its_tokens(stream: bool) -> None:
    def engine_of() -> Engine:
        engine = Engine()
        engine.tool_call = ADD
        return engine

    async def agent(row: dict[str, Any], url: str, key: str) -> None:
        client, messages = AsyncOpenAI(base_url=url, api_key=key), [*row["messages"]]
        arguments: dict[str, Any] = {"model": "m", "messages": messages, "tools": [TOOL]}
        if stream:
            chunks = [chunk async for chunk in await client.chat.completions.create(**arguments, stream=True)]
            calls = [call.model_dump(exclude={"index"}) for call in chunks[0].choices[0].delta.tool_calls or []]
            message = {"role": "assistant", "tool_calls": calls}
            assert chunks[1].choices[0].finish_reason == "tool_calls"
        else:
            choice = (await client.chat.completions.create(**arguments)).choices[0]
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
            message = choice.message.model_dump()
        [call] = message["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "22"}]
        await client.chat.completions.create(**arguments)
        changed = json.loads(json.dumps(messages))
        changed[1]["tool_calls"][0]["function"]["arguments"] = '{"a": 2}'
        await client.chat.completions.create(model="m", messages=changed, tools=[TOOL], tool_choice="none")

    engine, [completion] = run(engine_of, agent)
    assert engine.requests[1].messages[1:] == [
        {"role": "assistant", "content": [101]},
        {"role": "tool", "content": "22", "tool_call_id": engine.requests[1].messages[2]["tool_call_id"]},
    ]
    assert [request.tools for request in engine.requests] == [[TOOL], [TOOL], None]
    assert engine.requests[2].messages[1]["content"] == ""  # a call that the agent has changed is another text
    [earlier] = completion.earlier
    assert earlier.completion_ids == [101, 2, 102] and completion.completion_ids == [103]
    assert completion.infos == {"num_turns": 3}


async def raises(row: dict[str, Any], url: str, key: str) -> float:
    client_of(url, key).chat.completions.create(model="m", messages=[USER])
    raise LookupError("no such tool")


async def exits(row: dict[str, Any], url: str, key: str) -> float:
    raise SystemExit(3)


async def nonsense(row: dict[str, Any], url: str, key: str) -> Any:
    client_of(url, key).chat.completions.create(model="m", messages=[USER])
    return "good"


async def too_large(row: dict[str, Any], url: str, key: str) -> Any:
    client_of(url, key).chat.completions.create(model="m", messages=[USER])
    return 10**400


async def hangs(row: dict[str, Any], url: str, key: str) -> float:
    client_of(url, key).chat.completions.create(model="m", messages=[USER])
    RELEASED.wait(60)
    return 1.0


@pytest.mark.parametrize("number", [np.float32(0.5), np.int64(2), 1])
def test_any_number_is_a_reward(number: Any) -> None:
    async def agent(row: dict[str, Any], url: str, key: str) -> Any:
        client_of(url, key).chat.completions.create(model="m", messages=[USER])
        return number

    _, [completion] = run(Engine, agent)
    assert completion.infos == {"total_reward": float(number), "num_turns": 1}


async def silent(row: dict[str, Any], url: str, key: str) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("agent", "error", "tokens"),
    [
        (raises, "LookupError: no such tool", [101]),
        (exits, "SystemExit: 3", []),
        (nonsense, "TypeError: it returned 'good', which is neither a number nor None", [101]),
        (too_large, "OverflowError", [101]),
        (hangs, "it did not end within 1 seconds", [101]),
        (silent, "it ended without an answer of the policy", []),
    ],
)
def test_an_agent_that_fails_has_an_error_in_its_completion(agent: Any, error: str, tokens: list[int]) -> None:
    RELEASED.clear()
    _, [completion] = run(Engine, agent, seconds=1.0 if agent is hangs else 20.0)
    RELEASED.set()
    assert completion.infos[AGENT_ERROR].startswith(error) and completion.completion_ids == tokens
    assert completion.prompt_ids == [4]


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_completion_without_a_call_has_log_probs_if_they_are_requested(logprobs: bool) -> None:
    """Otherwise a trainer takes its server for broken, or packs it with completions that have none."""

    async def one() -> Any:
        register_agent("agent")(silent)
        engine = Engine()
        conversations = Conversations(multi_turns["agent"](infer_engine=engine, max_turns=None, tokenizer=engine))
        request = RolloutInferRequest(messages=[dict(USER)], uuid="0-0", data_dict={})
        return await conversations.complete(request, RequestConfig(max_tokens=9, logprobs=logprobs, seed=5), None)

    try:
        completion = asyncio.run(one())
    finally:
        del multi_turns["agent"]
    assert completion.completion_ids == [] and completion.logprobs == ([] if logprobs else None)


def test_agents_at_once_have_their_own_keys_and_calls() -> None:
    keys = set[str]()

    async def agent(row: dict[str, Any], url: str, key: str) -> float:
        client, messages = AsyncOpenAI(base_url=url, api_key=key), [{"role": "user", "content": "x" * row["number"]}]
        keys.add(key)
        for _ in range(3):
            answer = await client.chat.completions.create(model="m", messages=messages)
            messages += [answer.choices[0].message.model_dump(exclude_none=True), USER]
        return float(row["number"])

    _, completions = run(Engine, agent, many=32, seconds=60.0)
    assert len(keys) == 32
    for number, completion in enumerate(completions):
        assert completion.infos == {"total_reward": number, "num_turns": 3} and completion.earlier == ()
        assert completion.prompt_ids == [number] and completion.sampled == [True, False] * 2 + [True]


def test_agents_at_once_have_more_files_than_a_shell_gives() -> None:
    """Each has an event loop and a connection, of which both ends are in this process."""
    everyone = Barrier(100)

    async def agent(row: dict[str, Any], url: str, key: str) -> None:
        client_of(url, key).chat.completions.create(model="m", messages=[USER])
        everyone.wait(30)

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 200, before[1]))
    try:
        _, completions = run(Engine, agent, many=100, seconds=60.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not any(AGENT_ERROR in completion.infos for completion in completions)


def test_a_key_ends_with_its_rollout_and_calls_are_bounded() -> None:
    late: dict[str, Any] = {}

    async def agent(row: dict[str, Any], url: str, key: str) -> float:
        client = client_of(url, key)
        client.chat.completions.create(model="m", messages=[USER])
        late.update(url=url, key=key)
        with pytest.raises(openai.BadRequestError, match=r"a rollout has at most 1 calls \(--max_turns\)"):
            client.chat.completions.create(model="m", messages=[USER])
        return 1.0

    async def main() -> None:
        engine = Engine()
        [completion] = await complete(engine, agent, most=1)
        assert completion.infos == {"total_reward": 1.0, "num_turns": 1}
        client = client_of(late["url"], late["key"])
        with pytest.raises(openai.AuthenticationError, match="of no rollout, or of one that has ended"):
            await asyncio.to_thread(client.chat.completions.create, model="m", messages=[USER])
        with pytest.raises(openai.AuthenticationError):
            await asyncio.to_thread(client_of(late["url"], "guess").models.list)

    asyncio.run(main())


def test_calls_that_run_when_an_agent_ends_are_cancelled_and_not_trained() -> None:
    async def agent(row: dict[str, Any], url: str, key: str) -> None:
        client = AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
        calls = [asyncio.create_task(client.chat.completions.create(model="m", messages=[USER])) for _ in range(3)]
        await asyncio.sleep(1.0)
        assert not any(call.done() for call in calls)

    async def main() -> None:
        engine = Engine()
        engine.go.clear()
        [completion] = await complete(engine, agent)
        await asyncio.sleep(0.1)
        assert engine.cancelled == len(engine.requests) == 3
        assert completion.infos[AGENT_ERROR] == "it ended without an answer of the policy"

    asyncio.run(main())


def test_a_call_whose_client_has_gone_is_not_trained() -> None:
    engines: list[Engine] = []

    async def agent(row: dict[str, Any], url: str, key: str) -> None:
        client = AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
        await client.chat.completions.create(model="m", messages=[USER])
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="m", messages=[USER], timeout=0.3, user="slow")
        async with asyncio.timeout(20):
            while not engines[0].cancelled:
                await asyncio.sleep(0.01)

    async def main() -> None:
        engines.append(engine := Engine())
        running = asyncio.create_task(complete(engine, agent))
        while len(engine.sampling) < 1:
            await asyncio.sleep(0.001)
        engine.go.clear()
        [completion] = await running
        assert len(engine.requests) == 2 and engine.cancelled == 1
        assert completion.infos == {"num_turns": 1} and completion.completion_ids == [101]

    asyncio.run(main())


def test_a_limit_of_all_calls_holds_for_calls_at_once() -> None:
    """One token an answer: three of five are answered."""

    async def agent(row: dict[str, Any], url: str, key: str) -> None:
        client = AsyncOpenAI(base_url=url, api_key=key)
        calls = [client.chat.completions.create(model="m", messages=[USER]) for _ in range(5)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [result for result in results if isinstance(result, openai.BadRequestError)]
        assert len(refused) == 2 and all(each.code == "context_length_exceeded" for each in refused)

    engine, [completion] = run(Engine, agent, limit=3)
    assert completion.infos == {"num_turns": 3}
    assert sorted(each.max_tokens or 0 for each in engine.sampling) == [1, 2, 3]


def test_calls_that_wait_for_a_limit_have_seeds_of_their_own() -> None:
    async def main() -> list[int | None]:
        register_agent("agent")(silent)
        engine, sampling = Engine(), RequestConfig(max_tokens=9, logprobs=True, seed=5)
        engine.go.clear()
        scheduler = multi_turns["agent"](infer_engine=engine, tokenizer=engine)
        request = RolloutInferRequest(messages=[dict(USER)], uuid="0-0")
        rollout = AgentRollout(scheduler, request, sampling, TurnRecorder(sampling, 9))
        calls = [chat.parse(json.dumps({"messages": [USER]}).encode()) for _ in range(3)]
        answers = [asyncio.wrap_future(rollout.ask(call)) for call in calls]
        while not engine.sampling:
            await asyncio.sleep(0)  # until the first one generates, and the others wait for what it leaves
        engine.go.set()
        await asyncio.gather(*answers)
        return [each.seed for each in engine.sampling]

    assert len({*asyncio.run(main())}) == 3


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [(NoRoom(), "context_length_exceeded", "leave no room"), (KeyError("role"), None, r"cannot encode .* \(KeyError:")],
)
def test_messages_that_the_engine_cannot_take_are_refused(error: Exception, status: str | None, message: str) -> None:
    def engine_of() -> Engine:
        engine = Engine()
        engine.error = error
        return engine

    async def agent(row: dict[str, Any], url: str, key: str) -> None:
        with pytest.raises(openai.BadRequestError, match=message) as refusal:
            client_of(url, key).chat.completions.create(model="m", messages=[USER])
        assert refusal.value.code == status

    _, [completion] = run(engine_of, agent)
    assert completion.infos[AGENT_ERROR] == "it ended without an answer of the policy"


def test_more_calls_at_once_than_are_allowed_are_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "MOST_AT_ONCE", 2)

    async def agent(row: dict[str, Any], url: str, key: str) -> None:
        client = AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
        calls = [asyncio.create_task(client.chat.completions.create(model="m", messages=[USER])) for _ in range(3)]
        [failed], _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(openai.RateLimitError, match="at most 2 calls at once"):
            await failed

    async def main() -> None:
        engine = Engine()
        engine.go.clear()
        await complete(engine, agent)

    asyncio.run(main())


def test_the_text_of_an_answer_ends_before_the_stop_of_its_call() -> None:
    async def agent(row: dict[str, Any], url: str, key: str) -> None:
        client = client_of(url, key)
        first = client.chat.completions.create(model="m", messages=[USER], stop=["r 1", "er"]).choices[0]
        assert first.message.content == "answ" and first.finish_reason == "stop"
        messages: Any = [USER, {"role": "assistant", "content": "answ"}, USER]
        client.chat.completions.create(model="m", messages=messages)

    engine, [completion] = run(Engine, agent)
    assert engine.requests[1].messages[1] == {"role": "assistant", "content": [101]}
    assert completion.completion_ids == [101, 4, 102]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_an_agent_without_a_usable_limit_of_time_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds must be a positive number"):
        register_agent("agent", seconds)


def test_an_agent_needs_a_name_of_its_own_and_a_coroutine() -> None:
    with pytest.raises(ValueError, match="there is a scheduler 'gym_scheduler' already"):
        register_agent("gym_scheduler")(silent)
    with pytest.raises(ValueError, match="is not a coroutine"):
        register_agent("agent")(lambda row, url, key: None)  # type: ignore[arg-type, return-value]
