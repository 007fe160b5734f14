"""Agents of Anthropic's package: its client at the real address, with an engine that gives fixed answers."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from swift.infer_engine.protocol import Function

from swift_megatron_grpo.generation.conversations.running import NoRoom
from swift_megatron_grpo.types import AGENT_ERROR
from tests.unit.generation.conversations.answering import USER, Engine, run

TOOL: Any = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}
AS_OPENAI = {"type": "function", "function": {"name": "add", "description": "adds",
             "parameters": {"type": "object", "properties": {}}}}  # fmt: skip


def client_of(url: str, key: str) -> Anthropic:
    return Anthropic(base_url=url, api_key=key, max_retries=0, timeout=15)


@pytest.mark.parametrize("address", ["as given", "without /v1"])
def test_an_agent_is_trained_on_every_context_of_its_calls(address: str) -> None:
    async def agent(row: dict[str, Any], url: str, key: str) -> float:
        client = client_of(url if address == "as given" else url.removesuffix("/v1"), key)
        asked: dict[str, Any] = {"model": "m", "max_tokens": 3, "extra_body": {"temperature": 0.1}}
        first = client.messages.create(messages=row["messages"], system="Be short.", **asked)
        [block] = first.content
        assert block.type == "text" and block.text == "answer 1" and first.stop_reason == "end_turn"
        assert (first.model, first.role, first.usage.input_tokens, first.usage.output_tokens) == (
            "m",
            "assistant",
            2,
            1,
        )
        more = {"role": "user", "content": [{"type": "text", "text": "Sure?", "cache_control": {"type": "ephemeral"}}]}
        messages = [*row["messages"], first.to_param(), more]
        with client.messages.stream(messages=messages, system="Be short.", stop_sequences=["."], **asked) as stream:
            assert "".join(stream.text_stream) == "answer 2"
            assert stream.get_final_message().usage.output_tokens == 1
        alone = client.messages.create(messages=[{"role": "user", "content": "Go on."}], **asked)
        assert alone.content[0].model_dump()["text"] == "answer 3"
        return 0.5

    engine, [completion] = run(Engine, agent)
    [earlier] = completion.earlier
    assert (earlier.prompt_ids, earlier.completion_ids) == ([9, 4], [101, 5, 102])
    assert earlier.sampled == [True, False, True] and completion.completion_ids == [103]
    assert completion.infos == {"total_reward": 0.5, "num_turns": 3}
    assert [request.messages for request in engine.requests] == [
        [{"role": "system", "content": "Be short."}, USER],
        [{"role": "system", "content": "Be short."}, USER, {"role": "assistant", "content": [101]},
         {"role": "user", "content": "Sure?"}],
        [{"role": "user", "content": "Go on."}],
    ]  # fmt: skip
    assert [each.max_tokens for each in engine.sampling] == [3, 3, 3] and engine.sampling[1].stop == ["."]


@pytest.mark.parametrize("stops", [["er", "xyz"], ["xyz"]])
def test_the_stop_of_a_call_that_ends_an_answer_is_named(stops: list[str]) -> None:
    async def agent(row: dict[str, Any], url: str, key: str) -> None:
        asked: dict[str, Any] = {"model": "m", "max_tokens": 3, "messages": row["messages"]}
        answer = client_of(url, key).messages.create(**asked, stop_sequences=stops)
        [block] = answer.content
        assert block.type == "text"
        ended = (block.text, answer.stop_reason, answer.stop_sequence)
        assert ended == (("answ", "stop_sequence", "er") if "er" in stops else ("answer 1", "end_turn", None))

    _, [completion] = run(Engine, agent)
    assert AGENT_ERROR not in completion.infos


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_is_sent_back_by_its_tokens(stream: bool) -> None:
    """The package sends the input in a spelling of its own, and the policy's has no space after the colon."""

    def engine_of() -> Engine:
        engine = Engine()
        engine.tool_call = Function(name="add", arguments='{"a":1}')
        return engine

    async def agent(row: dict[str, Any], url: str, key: str) -> None:
        client, messages = AsyncAnthropic(base_url=url, api_key=key), [*row["messages"]]
        asked: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": messages, "tools": [TOOL]}
        if stream:
            async with client.messages.stream(**asked) as events:
                answer = await events.get_final_message()
        else:
            answer = await client.messages.create(**asked)
        [block] = answer.content
        assert block.type == "tool_use" and (block.name, block.input) == ("add", {"a": 1})
        assert answer.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "22"}]}
        messages += [answer.to_param(), {"role": "user", "content": [result, {"type": "text", "text": "And?"}]}]
        await client.messages.create(**asked, tool_choice={"type": "none"})

    engine, [completion] = run(engine_of, agent)
    first, second = engine.requests
    assert first.tools == [AS_OPENAI] and second.tools is None
    _, called, result, more = second.messages
    assert called == {"role": "assistant", "content": [101]} and more == {"role": "user", "content": "And?"}
    assert (result["role"], result["content"]) == ("tool", "22") and completion.earlier == ()
    assert completion.completion_ids == [101, 2, 4, 102] and completion.infos == {"num_turns": 2}


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "[" * 5000])
def test_a_call_without_an_object_as_input_is_the_text_of_the_policy(arguments: str) -> None:
    def engine_of() -> Engine:
        engine = Engine()
        engine.tool_call = Function(name="add", arguments=arguments)
        return engine

    async def agent(row: dict[str, Any], url: str, key: str) -> None:
        client = client_of(url, key)
        answer = client.messages.create(model="m", max_tokens=9, messages=row["messages"], tools=[TOOL])
        assert answer.content[0].model_dump()["text"] == "answer 1" and answer.stop_reason == "end_turn"
        messages = [*row["messages"], answer.to_param(), {"role": "user", "content": "Again."}]
        client.messages.create(model="m", max_tokens=9, messages=messages)

    _, [completion] = run(engine_of, agent)
    assert completion.completion_ids == [101, 6, 102] and completion.earlier == ()


def test_thoughts_of_another_model_are_left_out() -> None:
    async def agent(row: dict[str, Any], url: str, key: str) -> None:
        thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
        said = {"role": "assistant", "content": [thought, {"type": "text", "text": "Hello."}]}
        messages: list[Any] = [*row["messages"], said, USER]
        client_of(url, key).messages.create(
            model="m", max_tokens=9, messages=messages, thinking={"type": "enabled", "budget_tokens": 1024}
        )

    engine, _ = run(Engine, agent)
    assert engine.requests[0].messages == [USER, {"role": "assistant", "content": "Hello."}, USER]


def test_refusals_are_errors_of_the_package() -> None:
    def engine_of() -> Engine:
        engine = Engine()
        engine.error = NoRoom()
        return engine

    async def agent(row: dict[str, Any], url: str, key: str) -> None:
        asked: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": row["messages"]}
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .*\(--vllm_max_model_len\)"):
            client_of(url, key).messages.create(**asked)
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            client_of(url, "guess").messages.create(**asked)

    _, [completion] = run(engine_of, agent)
    assert completion.infos[AGENT_ERROR] == "it ended without an answer of the policy"
