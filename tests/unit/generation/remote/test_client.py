"""The client of a rollout server against a real server that does not answer."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web

from swift_megatron_grpo.generation.remote.client import Client, Slow, Unreachable, make_session
from swift_megatron_grpo.protocol.messages import Routes

pytestmark = pytest.mark.alone


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


def test_who_waits_for_a_lost_server_learns_of_it() -> None:
    async def story() -> None:
        runner, url = await _silent_server()
        async with make_session(None, "a run") as session:
            client = Client(url, session)
            with pytest.raises(Slow):
                await client.status(timeout=0.2)
            began = time.monotonic()
            waiting = [asyncio.create_task(client.status(timeout=60)) for _ in range(3)]
            await asyncio.sleep(0.2)
            waiting[0].cancel()  # by who asked: that is no news of the server
            with pytest.raises(asyncio.CancelledError):
                await waiting[0]
            client.give_up()
            for each in waiting[1:]:
                with pytest.raises(Unreachable):
                    await each
            assert time.monotonic() - began < 10 and not client._asking
        await runner.cleanup()

    asyncio.run(story())
