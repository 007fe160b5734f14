"""An external plugin: agents that call the policy by the packages of OpenAI and Anthropic, and agents that fail."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from typing import Any

import openai
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from swift_megatron_grpo.generation.conversations.agents import register_agent

TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}


@register_agent("calls")
async def calls(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Ask three times in one conversation, then in another one, whole and as a stream."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": row["messages"][-1]["content"]}]
    first = await client.chat.completions.create(model="policy", messages=messages, temperature=0.1)
    messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "And then?"}]
    second = await client.chat.completions.create(model="policy", messages=messages)
    messages += [second.choices[0].message.model_dump(exclude_none=True)]
    result = {"type": "tool_result", "tool_use_id": "call", "content": "22"}
    third = await AsyncAnthropic(base_url=base_url, api_key=api_key).messages.create(
        model="policy", max_tokens=1024, messages=[*messages, {"role": "user", "content": [result]}]
    )
    assert third.usage.output_tokens >= 1 and third.content[0].type == "text"
    alone = [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "Go."}]}]
    stream = await client.chat.completions.create(
        model="policy", messages=alone, max_tokens=5, stream=True, tools=[TOOL], stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    usage = chunks[-1].usage
    assert usage is not None and 1 <= usage.completion_tokens <= 5 and len(chunks) == 3
    try:
        await client.chat.completions.create(model="policy", messages=messages, n=2)
    except openai.BadRequestError as error:
        assert "n 2 is not supported; use 1" in str(error)
    else:
        raise AssertionError("two answers were not refused")
    return float(len(first.choices[0].message.content or "") % 7)


@register_agent("failing", seconds=25.0)
async def failing(row: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Call without a package, and fail in the way of the row; wait in a blocking call."""
    if row["way"] == "ends":
        sys.exit(3)
    call = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps({"messages": row["messages"][-1:]}).encode(),
        {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(call) as response:
        answer = json.load(response)["choices"][0]["message"]["content"]
    if row["way"] == "raises":
        raise LookupError("no such tool")
    if row["way"] == "hangs":
        time.sleep(10_000)
    return "good" if row["way"] == "nonsense" else float(len(answer) % 5)
