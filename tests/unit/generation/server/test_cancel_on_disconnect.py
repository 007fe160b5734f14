"""Work that a client no longer waits for is cancelled, over real connections and pipes, without an engine."""

from __future__ import annotations

import asyncio
from multiprocessing import Pipe
from typing import Any

import aiohttp
import pytest
import uvicorn
from fastapi import FastAPI, Request

from swift_megatron_grpo.generation.server.pipe import CommandError, Commands, serve
from swift_megatron_grpo.generation.server.responses import while_connected


class Work:
    """A command that never ends, unless called with `finishes`."""

    def __init__(self) -> None:
        self.began, self.cancelled = asyncio.Event(), asyncio.Event()

    async def __call__(self, finishes: bool = False) -> dict[str, Any]:
        self.began.set()
        try:
            await asyncio.sleep(0 if finishes else 60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return {"done": True}


def test_a_request_is_cancelled_when_its_client_disconnects() -> None:
    async def scenario() -> None:
        work, app = Work(), FastAPI()

        async def respond(body: dict[str, bool], client: Request) -> dict[str, Any]:
            return await while_connected(client, work(body["finishes"]))

        respond.__annotations__["client"] = Request  # FastAPI resolves annotations in the module's namespace
        app.post("/")(respond)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
        async with aiohttp.ClientSession() as session:
            async with session.post(url, json={"finishes": True}) as response:
                assert await response.json() == {"done": True}
            with pytest.raises(TimeoutError):
                await session.post(url, json={"finishes": False}, timeout=aiohttp.ClientTimeout(total=0.5))
            await asyncio.wait_for(work.cancelled.wait(), 5)
        server.should_exit = True
        await serving

    asyncio.run(scenario())


def test_cancelling_a_call_cancels_the_command_at_the_other_end_of_the_pipe() -> None:
    async def scenario() -> None:
        web_server, engine = Pipe()
        work = Work()
        commands = Commands(web_server)
        serving = asyncio.create_task(serve(engine, {"work": work}))
        reading = asyncio.create_task(commands.read_results())
        waiting = asyncio.create_task(commands.call("work"))
        await work.began.wait()
        waiting.cancel()
        await asyncio.wait_for(work.cancelled.wait(), 5)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await commands.call("work", finishes=True) == {"done": True}  # later commands still run
        with pytest.raises(CommandError):
            await commands.call("work", finishes="yes", other=1)
        for task in (serving, reading):
            task.cancel()
        engine.close()

    asyncio.run(scenario())
