"""An external plugin with agents. Every second one gives up a call and continues once vLLM has removed its turn.

No turn ends by itself, and one without a limit of its own takes 1,900 steps. Each process of an engine appends the
names of removed turns, behind the number of steps before, to the file REMOVED.RANK, or REMOVED.server.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from vllm import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from swift_megatron_grpo.generation.conversations.agents import register_agent

QUESTION = {"role": "user", "content": "And then?"}
add_request, step, abort_request = LLMEngine.add_request, LLMEngine.step, LLMEngine.abort_request
steps, given_up, removed = 0, 0, 0


def add_endless(self: Any, name: str, prompt: Any, params: SamplingParams, **options: Any) -> Any:
    params.ignore_eos, params.stop, params.stop_token_ids = True, [], []
    return add_request(self, name, prompt, params, **options)


def step_and_count(self: Any) -> Any:
    global steps
    steps += 1
    return step(self)


def abort_and_note(self: Any, names: list[str]) -> None:
    global removed
    abort_request(self, names)
    removed += len(names)
    with Path(f"{os.environ['REMOVED']}.{os.environ.get('RANK', 'server')}").open("a") as file:
        file.write(f"{steps} {' '.join(names)}\n")


LLMEngine.add_request, LLMEngine.step, LLMEngine.abort_request = add_endless, step_and_count, abort_and_note


@register_agent("impatient", seconds=100.0)
async def impatient(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Call twice. An impatient agent makes another call in between and gives it up."""
    global given_up
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages: list[Any] = [*row["messages"]]
    first = await client.chat.completions.create(model="policy", messages=messages, max_tokens=20)
    messages += [first.choices[0].message.model_dump(exclude_none=True), QUESTION]
    if row["gives_up"]:
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="policy", messages=messages, timeout=0.5)
        given_up += 1
        async with asyncio.timeout(30):
            while removed < given_up:
                await asyncio.sleep(0.01)
    last = await client.chat.completions.create(model="policy", messages=messages, max_tokens=20)
    return float(len(last.choices[0].message.content or "") % 7)
