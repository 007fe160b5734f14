"""Responses of the gate when a route fails or too much is in progress; the rest is tests/e2e/test_server_attacks.py."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from swift.utils import get_logger

from swift_megatron_grpo.generation.protocol.messages import Routes
from swift_megatron_grpo.generation.server.gate import Gate
from swift_megatron_grpo.generation.server.schema import ContentLimits

KEY = "schlüssel"
LIMITS = {"body_bytes": 100, "body_seconds": 1, "most_requests": 2}
CONTENT = ContentLimits(
    nesting=8, messages=8, prompt_characters=100, max_model_len=8, vocab_size=10, accepts_media=False
)


def application(**limits: Any) -> tuple[FastAPI, asyncio.Event]:
    app, release = FastAPI(), asyncio.Event()

    @app.post("/fail")
    async def fail() -> None:
        raise RuntimeError("a secret of the server")

    @app.post("/wait")
    async def wait(request: Request) -> str:
        await release.wait()
        return str(len(await request.body()))

    @app.post(Routes.GENERATE_BATCH)
    async def generate_batch() -> None: ...

    app.add_middleware(Gate, key=KEY, **{**LIMITS, **limits}, content=lambda: CONTENT)
    return app, release


def client(app: FastAPI) -> httpx.AsyncClient:
    headers = {b"Authorization": b"Bearer " + KEY.encode()}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server", headers=headers)


def test_a_failing_route_answers_with_a_number_that_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> httpx.Response:
        async with client(application()[0]) as session:
            return await session.post("/fail")

    get_logger().addHandler(caplog.handler)
    with caplog.at_level(logging.ERROR):
        response = asyncio.run(scenario())
    get_logger().removeHandler(caplog.handler)
    assert response.status_code == 500 and "secret" not in response.text and "Traceback" not in response.text
    [number] = re.findall(r"as error (\w{8})$", response.json()["detail"])
    assert f"error {number} in POST '/fail'" in caplog.text and "a secret of the server" in caplog.text


def test_requests_beyond_the_limit_are_refused_until_others_end() -> None:
    async def scenario() -> list[int]:
        app, release = application()
        async with client(app) as session:
            waiting = [asyncio.create_task(session.post("/wait", content=b"abc")) for _ in range(2)]
            await asyncio.sleep(0.1)
            refused = await session.post("/wait")
            release.set()
            responses = [*await asyncio.gather(*waiting), await session.post("/wait")]
        return [response.status_code for response in (refused, *responses)]

    assert asyncio.run(scenario()) == [429, 200, 200, 200]


def test_each_request_of_a_batch_counts() -> None:
    one = {"request": {"messages": [{"role": "user", "content": "a"}]}, "sampling": {}, "weights_version": 1}

    async def scenario() -> list[int]:
        app, _ = application(body_bytes=10_000)
        async with client(app) as session:
            batches = [{"requests": [one] * size} for size in (3, 2, 2)]
            return [(await session.post(Routes.GENERATE_BATCH, json=batch)).status_code for batch in batches]

    assert asyncio.run(scenario()) == [429, 200, 200]
