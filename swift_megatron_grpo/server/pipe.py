"""Commands from the web server to the process that holds the engine: many at a time, each with an id, JSON both ways.
One that the web server no longer waits for is taken back.

ms-swift's own pipe carries one command at a time, and its web server waits for the answer without serving anybody
else. This is a second pipe beside it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

Command = Callable[..., Awaitable[Any]]


class CommandError(RuntimeError):
    """The command failed in the engine's process."""


class EngineGone(RuntimeError):
    """The engine's process is no more."""


class Commands:
    """The web server's end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._gone = False

    async def read_answers(self) -> None:
        """Runs until the other end is gone."""
        try:
            async for answer in _messages(self._connection):
                waiting = self._waiting.pop(answer["id"], None)
                if waiting is None or waiting.done():
                    continue
                if "error" in answer:
                    waiting.set_exception(CommandError(answer["error"]))
                else:
                    waiting.set_result(answer["result"])
        finally:
            self._gone = True
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(EngineGone("the process of the vLLM engine has ended"))
            self._waiting.clear()

    async def call(self, command: str, **arguments: Any) -> Any:
        if self._gone:
            raise EngineGone("the process of the vLLM engine has ended")
        number = next(self._ids)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            _send(self._connection, {"id": number, "command": command, "arguments": arguments})
            return await answer
        except asyncio.CancelledError:  # nobody waits for it any more
            if not self._gone:
                _send(self._connection, {"id": number, "take_back": True})
            raise
        finally:
            self._waiting.pop(number, None)


async def serve(connection: Connection, commands: Mapping[str, Command]) -> None:
    """The engine's end: runs each command as a task of its own, until the other end is gone."""
    running: dict[int, asyncio.Task[None]] = {}

    async def answer(message: dict[str, Any]) -> None:
        try:
            said = {"id": message["id"], "result": await commands[message["command"]](**message["arguments"])}
        except asyncio.CancelledError:
            said = {"id": message["id"], "error": "taken back, because new weights arrived"}
        except Exception as error:
            said = {"id": message["id"], "error": f"{type(error).__name__}: {error}"}
        finally:
            running.pop(message["id"], None)
        _send(connection, said)

    async for message in _messages(connection):
        number = message["id"]
        if "take_back" in message:
            if number in running:
                running.pop(number).cancel()
        else:
            running[number] = asyncio.create_task(answer(message))


async def _messages(connection: Connection) -> AsyncIterator[dict[str, Any]]:
    """Until the other end is closed. A daemon thread waits for them, so that this process can end while it does."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes | None] = asyncio.Queue()

    def read() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            with suppress(EOFError, OSError):
                while True:
                    loop.call_soon_threadsafe(arrived.put_nowait, connection.recv_bytes())
            loop.call_soon_threadsafe(arrived.put_nowait, None)

    Thread(target=read, name="pipe", daemon=True).start()
    while (text := await arrived.get()) is not None:
        yield json.loads(text)


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())
