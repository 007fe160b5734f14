"""The client of a rollout server, against a real web server that never responds."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web

from swift_megatron_grpo.generation.remote.client import Client, RequestTimeout, Unreachable, make_session
from swift_megatron_grpo.protocol.messages import Routes, RunIdentity


async def _never(_: web.Request) -> web.Response:
    await asyncio.sleep(60)
    raise AssertionError


async def _silent_server() -> tuple[web.AppRunner, str]:
    app = web.Application()
    app.router.add_get(Routes.STATUS, _never)
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


def test_requests_to_a_lost_server_fail_at_once() -> None:
    async def scenario() -> None:
        runner, url = await _silent_server()
        async with make_session(None, RunIdentity("a run", "a secret")) as session:
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
