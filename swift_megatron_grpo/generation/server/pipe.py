"""Commands from the web server to the engine process: concurrent, each with an id, JSON in both directions.

A command is cancelled when the web server no longer waits for its result. ms-swift's own pipe carries one command at a
time, and its web server blocks until the result arrives. This is a second pipe next to it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

from swift.utils import get_logger

from swift_megatron_grpo.generation.protocol.messages import CANCELLED, INVALID

logger = get_logger()
Command = Callable[..., Awaitable[Any]]
_FAILED = 500
_SHOWN = 500  # characters of an error that a client may read


class InvalidRequest(ValueError):
    """The request of a client is at fault, and the client may read why."""

    status = INVALID


class CommandError(RuntimeError):
    """The command failed in the engine process."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status  # of the HTTP response


class EngineGone(RuntimeError):
    """The engine process has exited."""


class Commands:
    """The web server's end of the pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sender = _Sender(connection)
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[Any]] = {}  # by the command's id
        self._closed = False
        self._reason = "the process of the vLLM engine has exited"

    def expect_exit(self, reason: str) -> None:
        """Set the reason that pending commands fail with when the engine process exits."""
        self._reason = reason

    async def read_results(self) -> None:
        """Read results until the engine process exits."""
        try:
            async for response in _messages(self._connection):
                pending = self._pending.pop(response["id"], None)
                if pending is None or pending.done():
                    continue
                if "error" in response:
                    pending.set_exception(CommandError(response["status"], response["error"]))
                else:
                    pending.set_result(response["result"])
        finally:
            self._closed = True
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(EngineGone(self._reason))
            self._pending.clear()

    async def call(self, command: str, **arguments: Any) -> Any:
        """Run a command in the engine process and return its result. Cancelling the call cancels the command."""
        if self._closed:
            raise EngineGone(self._reason)
        number = next(self._ids)
        result = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            self._sender.send({"id": number, "command": command, "arguments": arguments})
            return await result
        except asyncio.CancelledError:
            if not self._closed:
                self._sender.send({"id": number, "cancel": True})
            raise
        finally:
            self._pending.pop(number, None)


async def serve(connection: Connection, commands: Mapping[str, Command]) -> None:
    """Run each command in its own task until the web server exits: the engine process's end of the pipe."""
    running: dict[int, asyncio.Task[None]] = {}
    sender = _Sender(connection)

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
        sender.send(response)

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


class _Sender:
    """Sends messages from a daemon thread: a process that is stopped reads nothing, and its pipe fills up."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: SimpleQueue[bytes] = SimpleQueue()
        Thread(target=self._run, name="pipe sender", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        self._messages.put(json.dumps(message).encode())

    def _run(self) -> None:
        with suppress(OSError):  # the other end is closed, which the reader detects
            while True:
                self._connection.send_bytes(self._messages.get())
