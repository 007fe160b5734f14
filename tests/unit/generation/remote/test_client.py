"""The client of a rollout server, against a real web server that never responds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from swift_megatron_grpo.generation.protocol.messages import PROTOCOL, Routes, RunIdentity
from swift_megatron_grpo.generation.remote.client import Client, make_session
from swift_megatron_grpo.runtime.http import InvalidResponse, Refused, RequestTimeout, Unreachable

RUN = RunIdentity("a run", "a secret")


async def _never(_: web.Request) -> web.Response:
    await asyncio.sleep(60)
    raise AssertionError


async def _server(status: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> tuple[web.AppRunner, str]:
    app = web.Application()
    app.router.add_get(Routes.STATUS, status)
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


@pytest.mark.parametrize("text", ["[]", "null", "{", '"a"', f'{{"protocol": {PROTOCOL}}}', "[" * 100_000, "\udc80"])
def test_a_status_that_is_no_status_is_a_failure_of_the_server(text: str) -> None:
    """The task that polls a server ended silently with such a response, so a restart was never detected."""

    async def scenario() -> None:
        async def respond(_: web.Request) -> web.Response:
            body = text.encode("utf-8", "surrogateescape")
            return web.Response(body=body, content_type="application/json", status=responses.pop(0))

        responses = [200, 500]
        runner, url = await _server(respond)
        async with make_session(None, RUN) as session:
            with pytest.raises(InvalidResponse):
                await Client(url, session).status(timeout=5)
            with pytest.raises(Refused) as refused:
                await Client(url, session).status(timeout=5)
            assert len(str(refused.value)) < 1100
        await runner.cleanup()

    asyncio.run(scenario())


def test_a_response_without_an_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift_megatron_grpo.generation.remote.client._MOST_BYTES", 2**20)

    async def scenario() -> None:
        async def flood(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(bytes(2**16))

        runner, url = await _server(flood)
        async with make_session(None, RUN) as session:
            with pytest.raises(InvalidResponse, match="more than 1048576 bytes"):
                await Client(url, session).status(timeout=20)
        await runner.cleanup()

    asyncio.run(scenario())


def test_requests_to_a_lost_server_fail_at_once() -> None:
    async def scenario() -> None:
        runner, url = await _server(_never)
        async with make_session(None, RUN) as session:
            client = Client(url, session)
            with pytest.raises(RequestTimeout):
                await client.status(timeout=0.2)
            began = time.monotonic()
            requests = [asyncio.create_task(client.status(timeout=60)) for _ in range(3)]
            await asyncio.sleep(0.2)
            requests[0].cancel()  # by the caller, so it is no failure of the server
            with pytest.raises(asyncio.CancelledError):
                await requests[0]
            client.cancel_requests()
            for request in requests[1:]:
                with pytest.raises(Unreachable):
                    await request
            assert time.monotonic() - began < 10 and not client._in_flight
        await runner.cleanup()

    asyncio.run(scenario())


def test_proxy_variables_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy would answer each request; the server itself refuses."""

    async def scenario() -> list[str]:
        requested: list[str] = []

        async def proxy(request: web.Request) -> web.Response:
            requested.append(str(request.url))
            return web.json_response({})

        async def refuse(_: web.Request) -> web.Response:
            return web.json_response({"detail": "the server itself"}, status=500)

        proxy_runner, proxy_url = await _server(proxy)
        runner, url = await _server(refuse)
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy_url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        async with make_session(None, RUN) as session:
            with pytest.raises(Refused, match="the server itself"):
                await Client(url, session).status(timeout=5)
        await runner.cleanup()
        await proxy_runner.cleanup()
        return requested

    assert asyncio.run(scenario()) == []
