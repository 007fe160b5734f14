"""What a client no longer waits for ends where it is made: real connections, real pipes, no engine."""

from __future__ import annotations

import asyncio
from multiprocessing import Pipe
from typing import Any

import aiohttp
import pytest
import uvicorn
from fastapi import FastAPI, Request

from swift_megatron_grpo.server.cancel_on_disconnect import while_connected
from swift_megatron_grpo.server.pipe import CommandError, Commands, serve


class Work:
    """For ever, unless it is told to finish."""

    def __init__(self) -> None:
        self.began, self.given_up = asyncio.Event(), asyncio.Event()

    async def __call__(self, finishes: bool = False) -> dict[str, Any]:
        self.began.set()
        try:
            await asyncio.sleep(0 if finishes else 60)
        except asyncio.CancelledError:
            self.given_up.set()
            raise
        return {"done": True}


def test_a_request_whose_client_has_gone_is_given_up() -> None:
    async def story() -> None:
        work, app = Work(), FastAPI()

        async def answer(asked: dict[str, bool], request: Request) -> dict[str, Any]:
            return await while_connected(request, work(asked["finishes"]))

        answer.__annotations__["request"] = Request  # FastAPI looks for names in the module
        app.post("/")(answer)
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
            await asyncio.wait_for(work.given_up.wait(), 5)
        server.should_exit = True
        await serving

    asyncio.run(story())


def test_a_command_that_is_taken_back_ends_at_the_other_end_of_the_pipe() -> None:
    async def story() -> None:
        ours, its = Pipe()
        work = Work()
        commands = Commands(ours)
        serving = asyncio.create_task(serve(its, {"work": work}))
        reading = asyncio.create_task(commands.read_answers())
        waiting = asyncio.create_task(commands.call("work"))
        await work.began.wait()
        waiting.cancel()
        await asyncio.wait_for(work.given_up.wait(), 5)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await commands.call("work", finishes=True) == {"done": True}  # the others go on
        with pytest.raises(CommandError):
            await commands.call("work", finishes="yes", other=1)
        for task in (serving, reading):
            task.cancel()
        its.close()

    asyncio.run(story())
