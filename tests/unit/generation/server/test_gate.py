"""The gate when a route fails or too much arrives; the rest is tests/e2e/test_server_attacks.py."""

from __future__ import annotations

import asyncio
import http.client
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from swift.utils import get_logger

from swift_megatron_grpo.generation.protocol.messages import Routes
from swift_megatron_grpo.generation.server.gate import Gate, bounded_protocol
from swift_megatron_grpo.generation.server.schema import ContentLimits

KEY = "schlüssel"
LIMITS = {"body_bytes": 100, "body_seconds": 1, "most_requests": 2}
CONTENT = ContentLimits(
    nesting=8, messages=8, prompt_characters=100, max_model_len=8, vocab_size=10, accepts_media=False, images=0
)


def application(**limits: Any) -> tuple[FastAPI, asyncio.Event]:
    app, release = FastAPI(), asyncio.Event()

    @app.api_route("/health", methods=["GET", "POST"])
    async def health() -> None: ...

    @app.post("/fail")
    async def fail() -> None:
        raise RuntimeError("a secret of the server")

    @app.post("/wait")
    async def wait(request: Request) -> str:
        await release.wait()
        return str(len(await request.body()))

    @app.post(Routes.GENERATE)
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


@pytest.mark.parametrize("route", [Routes.GENERATE, Routes.GENERATE_BATCH])
def test_each_completion_of_a_group_counts(route: str) -> None:
    one = {"request": {"messages": [{"role": "user", "content": "a"}]}, "sampling": {}, "weights_version": 1}

    async def scenario() -> list[int]:
        app, _ = application(body_bytes=10_000)
        async with client(app) as session:
            groups = [{**one, "group": size} for size in (3, 2, 2)]
            bodies = groups if route == Routes.GENERATE else [{"requests": [group]} for group in groups]
            return [(await session.post(route, json=body)).status_code for body in bodies]

    assert asyncio.run(scenario()) == [429, 200, 200]


def test_each_request_of_a_batch_counts() -> None:
    one = {"request": {"messages": [{"role": "user", "content": "a"}]}, "sampling": {}, "weights_version": 1}

    async def scenario() -> list[int]:
        app, _ = application(body_bytes=10_000)
        async with client(app) as session:
            batches = [{"requests": [one] * size} for size in (3, 2, 2)]
            return [(await session.post(Routes.GENERATE_BATCH, json=batch)).status_code for batch in batches]

    assert asyncio.run(scenario()) == [429, 200, 200]


def test_health_needs_no_key_unless_something_is_sent_to_it() -> None:
    async def scenario() -> list[int]:
        async with client(application()[0]) as session:
            without = {"Authorization": ""}
            return [
                (await session.request(method, "/health", headers=without)).status_code
                for method in ("GET", "HEAD", "POST", "PUT", "DELETE")
            ]

    assert asyncio.run(scenario()) == [200, 405, 401, 401, 401]


BODY = 100_000


@contextmanager
def listening() -> Iterator[int]:
    """Serve the application on a port, with the protocol of a rollout server."""
    app, release = application(body_bytes=BODY)
    release.set()
    config = uvicorn.Config(app, "127.0.0.1", 0, http=bounded_protocol(8, 60, BODY), log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize(
    ("key", "begins", "repeated"),
    [
        (KEY, b"0\r\n", b"X-T: a\r\n" * 1000),  # trailers, of which uvicorn keeps each
        (KEY, b"1;", b"a" * 10_000),  # an extension of a chunk
        ("wrong", b"0\r\n", b"X-T: a\r\n" * 1000),
    ],
)
def test_every_byte_of_a_request_counts(key: str, begins: bytes, repeated: bytes) -> None:
    head = "POST /wait HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    with listening() as port, socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(head.encode() + b"Authorization: Bearer " + key.encode() + b"\r\n\r\n" + begins)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(2000):
                connection.sendall(repeated)


def test_requests_on_one_connection_count_each_by_itself() -> None:
    with listening() as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        for _ in range(3):
            headers = {b"Authorization": b"Bearer " + KEY.encode()}
            connection.request("POST", "/wait", b"a" * BODY, headers)  # type: ignore[arg-type]
            response = connection.getresponse()
            assert response.status == 200 and response.read()
        connection.close()
