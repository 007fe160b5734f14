"""Commands from the web server to the engine process: concurrent, each with an id, lines of JSON in both directions.

A command is cancelled when the web server no longer waits for its result. ms-swift's own pipe, which remains next to
this one, carries one command at a time, and its web server blocks until the result arrives.
"""

import asyncio
import itertools
import json
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from fastapi import HTTPException
from swift.utils import get_logger

from swift_megatron_grpo.generation.protocol.messages import CANCELLED, ENGINE_GONE, InvalidRequest

logger = get_logger()
Command = Callable[..., Awaitable[Any]]
_FAILED = 500
_LONGEST_MESSAGE = 2**31  # bytes
_SHOWN = 500  # characters of an error that a client may read


class Commands:
    """The web server's end."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[Any]] = {}  # by the command's id
        self._closed = False
        self.reason_of_exit = "the process of the vLLM engine has exited"  # with which pending commands fail then

    async def open(self) -> None:
        self._messages, self._send = await _open(self._end)

    async def read_results(self) -> None:
        """Read results until the engine process exits."""
        try:
            async for response in self._messages:
                pending = self._pending.pop(response["id"], None)
                if pending is None or pending.done():
                    continue
                if "error" in response:
                    pending.set_exception(HTTPException(response["status"], response["error"]))
                else:
                    pending.set_result(response["result"])
        finally:
            self._closed = True
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(HTTPException(ENGINE_GONE, self.reason_of_exit))
            self._pending.clear()

    async def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Run a command in the engine process; raise HTTPException if it fails. Cancelling this cancels the command."""
        if self._closed:
            raise HTTPException(ENGINE_GONE, self.reason_of_exit)
        number = next(self._ids)
        result: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._pending[number] = result
        try:
            self._send({"id": number, "command": command, "arguments": arguments})
            return await result
        except asyncio.CancelledError:
            if not self._closed:
                self._send({"id": number, "cancel": True})
            raise
        finally:
            self._pending.pop(number, None)


async def serve(end: socket.socket, commands: Mapping[str, Command]) -> None:
    """Run each command in its own task until the web server exits: the engine process's end."""
    running: dict[int, asyncio.Task[None]] = {}
    messages, send = await _open(end)

    async def respond(message: dict[str, Any]) -> None:
        number = message["id"]
        try:
            response = {"id": number, "result": await commands[message["command"]](**message["arguments"])}
        except asyncio.CancelledError:
            reason = "cancelled, because new weights arrived or it was requested again"
            response = {"id": number, "status": CANCELLED, "error": reason}
        except InvalidRequest as error:
            response = {"id": number, "status": error.status, "error": str(error)}
        except Exception as error:
            place = uuid.uuid4().hex[:8]
            logger.exception(f"error {place}: the command {message['command']} failed")
            reason = f"{type(error).__name__}: {error}"[:_SHOWN]
            response = {"id": number, "status": _FAILED, "error": f"{reason} (error {place} in the server's log)"}
        finally:
            running.pop(number, None)
        send(response)

    async for message in messages:
        number = message["id"]
        if "cancel" in message:
            if number in running:
                running.pop(number).cancel()
        else:
            running[number] = asyncio.create_task(respond(message))


async def _open(end: socket.socket) -> tuple[AsyncIterator[dict[str, Any]], Callable[[dict[str, Any]], None]]:
    """Return the messages of the other end, and a function that sends one without waiting: its buffer has no limit."""
    reader, writer = await asyncio.open_unix_connection(sock=end, limit=_LONGEST_MESSAGE)

    async def messages() -> AsyncIterator[dict[str, Any]]:
        with suppress(ConnectionError):
            while (line := await reader.readline()).endswith(b"\n"):
                yield json.loads(line)

    return messages(), lambda message: writer.write(json.dumps(message).encode() + b"\n")
