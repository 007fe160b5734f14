"""Agent that runs an environment of verifiers, by its name: prompts, tools and rewards are those of the environment.

    export VERIFIERS_ENVIRONMENT=reverse-text VERIFIERS_ARGUMENTS='{}'
    python verifiers_agent.py FOLDER

writes FOLDER/train.jsonl. Training takes it as --dataset, with the same variables and --agent
verifiers_agent.py:verifiers_agent. Behind a server, `swift rollout` has the variables and the agent.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import verifiers
from openai import AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient

from swift_megatron_grpo.generation.conversations.agents import register_agent

NAME, ARGUMENTS = os.environ["VERIFIERS_ENVIRONMENT"], os.environ.get("VERIFIERS_ARGUMENTS", "{}")


def load() -> Any:
    """Load the environment, which takes over the signals that stop a run: give them back."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        return verifiers.load_environment(NAME, **json.loads(ARGUMENTS))
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


ENVIRONMENT = load()  # here, because signals are those of the main thread, in which files are imported


@cache
def loop() -> asyncio.AbstractEventLoop:
    """Return the one event loop in which the environment runs, as it expects."""
    started = asyncio.new_event_loop()
    Thread(target=started.run_forever, name="verifiers", daemon=True).start()
    return started


@register_agent("verifiers_agent", seconds=1800.0)
async def verifiers_agent(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Run the environment on the row. Return its reward."""
    running = asyncio.run_coroutine_threadsafe(run(json.loads(row["verifiers"]), base_url, api_key), loop())
    output = await asyncio.wrap_future(running)
    if output.get("error"):
        raise RuntimeError(f"the environment {NAME} failed: {output['error']}")
    return float(output["reward"])


async def run(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        return dict(await ENVIRONMENT.run_rollout(task, OpenAIChatCompletionsClient(client), "policy", {}))


def rows() -> list[dict[str, Any]]:
    """Return all tasks of the environment as rows of a dataset."""
    tasks = ENVIRONMENT.get_dataset().to_list()
    return [{"messages": task["prompt"], "verifiers": json.dumps(task)} for task in tasks]


if __name__ == "__main__":
    Path(sys.argv[1], "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
