"""Commands from the web server to the engine process: concurrent, each with an id, JSON in both directions.

A command is cancelled when the web server no longer waits for its result. ms-swift's own pipe carries one command at a
time, and its web server blocks until the result arrives. This is a second pipe next to it.
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
    """The command failed in the engine process."""


class EngineGone(RuntimeError):
    """The engine process has exited."""


class Commands:
    """The web server's end of the pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[Any]] = {}  # by the command's id
        self._closed = False

    async def read_results(self) -> None:
        """Read results until the engine process exits."""
        try:
            async for response in _messages(self._connection):
                pending = self._pending.pop(response["id"], None)
                if pending is None or pending.done():
                    continue
                if "error" in response:
                    pending.set_exception(CommandError(response["error"]))
                else:
                    pending.set_result(response["result"])
        finally:
            self._closed = True
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(EngineGone("the process of the vLLM engine has exited"))
            self._pending.clear()

    async def call(self, command: str, **arguments: Any) -> Any:
        """Run a command in the engine process and return its result. Cancelling the call cancels the command."""
        if self._closed:
            raise EngineGone("the process of the vLLM engine has exited")
        number = next(self._ids)
        result = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            _send(self._connection, {"id": number, "command": command, "arguments": arguments})
            return await result
        except asyncio.CancelledError:
            if not self._closed:
                _send(self._connection, {"id": number, "cancel": True})
            raise
        finally:
            self._pending.pop(number, None)


async def serve(connection: Connection, commands: Mapping[str, Command]) -> None:
    """Run each command in its own task until the web server exits: the engine process's end of the pipe."""
    running: dict[int, asyncio.Task[None]] = {}

    async def respond(message: dict[str, Any]) -> None:
        try:
            response = {"id": message["id"], "result": await commands[message["command"]](**message["arguments"])}
        except asyncio.CancelledError:
            response = {
                "id": message["id"],
                "error": "cancelled, because new weights arrived or it was requested again",
            }
        except Exception as error:
            response = {"id": message["id"], "error": f"{type(error).__name__}: {error}"}
        finally:
            running.pop(message["id"], None)
        _send(connection, response)

    async for message in _messages(connection):
        number = message["id"]
        if "cancel" in message:
            if number in running:
                running.pop(number).cancel()
        else:
            running[number] = asyncio.create_task(respond(message))


async def _messages(connection: Connection) -> AsyncIterator[dict[str, Any]]:
    """Yield messages until the other end is closed. A daemon thread reads them, so that this process can still exit."""
    loop = asyncio.get_running_loop()
    received: asyncio.Queue[bytes | None] = asyncio.Queue()

    def read() -> None:
        with suppress(RuntimeError):  # the event loop is closed
            with suppress(EOFError, OSError):
                while True:
                    loop.call_soon_threadsafe(received.put_nowait, connection.recv_bytes())
            loop.call_soon_threadsafe(received.put_nowait, None)

    Thread(target=read, name="pipe", daemon=True).start()
    while (text := await received.get()) is not None:
        yield json.loads(text)


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())
