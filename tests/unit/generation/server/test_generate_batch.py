"""A batch on a server: weights that arrive before a request of it reaches the engine refuse that request."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from starlette.requests import Request

from swift_megatron_grpo.generation.protocol.messages import CONFLICT, NO_WEIGHTS, RunIdentity
from swift_megatron_grpo.generation.server.gate import _BODY
from swift_megatron_grpo.generation.server.health import EngineHealth
from swift_megatron_grpo.generation.server.routes import RolloutRoutes
from swift_megatron_grpo.generation.server.schema import ContentLimits, GenerateBatch, parse

LIMITS = ContentLimits(8, 8, 1000, 64, 100, accepts_media=False)
RUN = RunIdentity("run", "secret")
REQUEST = {
    "request": {"messages": [{"role": "user", "content": "hello"}]}, "sampling": {"max_tokens": 4}, "weights_version": 3
}  # fmt: skip


class Engine:
    """Answers every command at once."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    async def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.commands.append(command)
        return {"text": "hi"}


def served(engine: Engine) -> RolloutRoutes:
    """Return the routes of a server with weights 3, without its processes."""
    arguments: Any = None
    commands: Any = engine
    routes = RolloutRoutes(arguments, commands, EngineHealth(lambda: engine.call("probe"), 60), engine_settings={})
    routes._lease.touch(RUN, time.monotonic())
    routes.weights_version = 3
    return routes


async def answers(server: RolloutRoutes, arrives: int | None) -> list[dict[str, Any]]:
    """Send a batch of two. `arrives`: version of weights that arrive after the batch was accepted; None: no weights."""
    scope = {"type": "http", _BODY: parse(json.dumps({"requests": [REQUEST] * 2}).encode(), GenerateBatch, LIMITS)}
    response = await server.generate_batch(Request(scope), RUN)
    if arrives is not None:
        server.weights_version = arrives
    lines = [line async for chunk in response.body_iterator for line in chunk.splitlines()]
    return sorted(map(json.loads, lines), key=lambda answer: answer["place"])


def test_each_request_is_answered_with_the_version_of_its_weights() -> None:
    engine = Engine()
    first, second = asyncio.run(answers(served(engine), arrives=None))
    assert first["completion"] == second["completion"] == {"text": "hi", "weights_version": 3}
    assert engine.commands == ["generate", "generate"]


def test_weights_that_arrive_before_a_request_reaches_the_engine_refuse_it() -> None:
    for arrives in (NO_WEIGHTS, 4):
        engine = Engine()
        refusals = asyncio.run(answers(served(engine), arrives))
        assert [answer["status"] for answer in refusals] == [CONFLICT, CONFLICT] and engine.commands == []
