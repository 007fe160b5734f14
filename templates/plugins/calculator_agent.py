"""Agent with a tool: it calls the model by OpenAI's package, calculates what the model asks for, and grades its answer.

    --agent calculator_agent.py:calculator_agent

Rows are those of reasoning_task.py. The reward is the score of the last answer.
"""

from __future__ import annotations

import json
from typing import Any

from calculator import calculate
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionFunctionToolParam
from reasoning_task import score

from swift_megatron_grpo.generation.conversations.agents import register_agent

MOST_CALLS = 3
TOOL: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Calculates an expression of numbers and + - * / ( ).",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


@register_agent("calculator_agent", seconds=300.0)
async def calculator_agent(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Ask the question of the row, and run the tool until there is an answer. Return its score."""
    messages, answer = row["messages"], ""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(MOST_CALLS):
            response = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
            message = response.choices[0].message
            answer = message.content or ""
            if not message.tool_calls:
                break
            messages.append(message.model_dump(exclude_none=True))
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": run_tool(call.function.arguments)}
                for call in message.tool_calls
                if call.type == "function"
            ]
    reward: float = score(answer, json.loads(row["problem"]))
    return reward


def run_tool(arguments: str) -> str:
    """Return the value of the expression that the model has written, or what is wrong with it."""
    try:
        result: str = calculate(str(json.loads(arguments)["expression"]))
    except (ValueError, TypeError, KeyError):
        return 'unknown: use {"expression": "17 + 25"}'
    return result
