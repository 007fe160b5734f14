"""Lines of a batch, and work that is cancelled when its client leaves, over real connections and without an engine."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import aiohttp
import pytest
import uvicorn
from fastapi import FastAPI, HTTPException, Request

from swift_megatron_grpo.generation.server.pipe import Commands, serve
from swift_megatron_grpo.generation.server.routes import answer_lines, while_connected


class Engine:
    """Completes a request when the test releases it."""

    def __init__(self, requests: int) -> None:
        self.released = [asyncio.Event() for _ in range(requests)]
        self.cancelled: list[int] = []

    async def complete(self, request: int) -> dict[str, Any]:
        try:
            await self.released[request].wait()
        except asyncio.CancelledError:
            self.cancelled.append(request)
            raise
        if request == 1:
            raise HTTPException(410, "new weights")
        if request == 2:
            raise RuntimeError("a secret")
        return {"text": str(request)}


def test_requests_are_answered_when_they_end_simultaneous_ones_together() -> None:
    async def read() -> None:
        engine = Engine(4)
        chunks = answer_lines(range(4), engine.complete)
        engine.released[3].set()
        assert _lines(await anext(chunks)) == [{"place": 3, "completion": {"text": "3"}}]
        for place in range(3):
            engine.released[place].set()
        refused = {"place": 1, "status": 410, "detail": "new weights"}
        *others, failed = _lines(await anext(chunks))
        assert others == [{"place": 0, "completion": {"text": "0"}}, refused]
        assert (failed["place"], failed["status"]) == (2, 500) and "secret" not in failed["detail"]
        assert await anext(chunks, None) is None

    asyncio.run(read())


def test_requests_without_an_answer_are_cancelled_when_the_client_leaves() -> None:
    async def leave() -> None:
        engine = Engine(4)
        engine.released[0].set()
        chunks = answer_lines(range(4), engine.complete)
        await anext(chunks)
        await chunks.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        assert engine.cancelled == [1, 2, 3]

    asyncio.run(leave())


def _lines(chunk: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in chunk.splitlines()]


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


async def echo(text: str) -> dict[str, Any]:
    return {"text": text}


def test_cancelling_a_call_cancels_the_command_at_the_pipes_other_end() -> None:
    async def scenario() -> None:
        web_server, engine = socket.socketpair()
        work = Work()
        commands = Commands(web_server)
        await commands.open()
        serving = asyncio.create_task(serve(engine, {"work": work, "echo": echo}))
        reading = asyncio.create_task(commands.read_results())
        waiting = asyncio.create_task(commands.call("work"))
        await work.began.wait()
        waiting.cancel()
        await asyncio.wait_for(work.cancelled.wait(), 5)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await commands.call("work", finishes=True) == {"done": True}  # later commands still run
        with pytest.raises(HTTPException):
            await commands.call("work", finishes="yes", other=1)
        long = "ä\n" * 2**21  # more than fits into the buffer of a socket
        assert await asyncio.gather(*(commands.call("echo", text=long) for _ in range(2))) == [{"text": long}] * 2
        for task in (serving, reading):
            task.cancel()

    asyncio.run(scenario())
