"""The address at which agents call the policy: an HTTP server of this machine alone, in a thread of its own.

The engine's event loop stands still while vLLM steps; this one answers nevertheless. A key is that of one rollout, and
ends with it. A call whose client has gone is withdrawn, and its answer is not trained.
"""

import asyncio
import secrets
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from threading import Thread
from typing import Any, Protocol

from aiohttp import web

from swift_megatron_grpo.generation.conversations import anthropic_chat, chat
from swift_megatron_grpo.generation.conversations.chat import Answer, Call, CallRefused
from swift_megatron_grpo.runtime.open_files import allow_open_files

MOST_CONNECTIONS = 4096
_OPEN_FILES = 2**16  # an agent has up to a dozen in this process: an event loop, both ends of connections, a program's
BODY_BYTES, BODY_SECONDS = 2**22, 30.0
_LINGERING_SECONDS = 1.0  # in which the rest of a refused body is read, so that its client sees why
_START_SECONDS = 30


class Session(Protocol):
    """One rollout. Both methods are called from the thread of the proxy."""

    def ask(self, call: Call) -> "Future[Answer]":
        """Let the policy answer. The future may be cancelled, or raise CallRefused."""

    def withdraw(self, call: Call) -> None:
        """Forget a call whose answer did not reach the agent."""


class Dialect(Protocol):
    """Reads what a package asks, and writes what it understands: chat.py is one, and anthropic_chat.py another."""

    def parse(self, body: bytes) -> Call: ...

    def to_json(self, call: Call, answer: Answer) -> dict[str, Any]: ...

    def to_stream(self, call: Call, answer: Answer) -> Iterator[bytes]: ...

    def refusal_json(self, refusal: CallRefused) -> dict[str, Any]: ...


# Anthropic's package adds the second path to an address without /v1, and OpenAI's the first to one with it.
_PATHS: dict[str, Dialect] = {
    "/v1/chat/completions": chat, "/v1/messages": anthropic_chat, "/v1/v1/messages": anthropic_chat,
}  # fmt: skip


class Proxy:
    def __init__(self, body_seconds: float = BODY_SECONDS) -> None:
        """Bind a port and start to serve."""
        allow_open_files(_OPEN_FILES)
        self._body_seconds = body_seconds
        self._sessions: dict[str, Session] = {}  # by key
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        started: Future[None] = Future()
        Thread(target=lambda: asyncio.run(self._serve(started)), name="agent proxy", daemon=True).start()
        started.result(_START_SECONDS)

    @contextmanager
    def serving(self, session: Session) -> Iterator[str]:
        """Serve a rollout under a key of its own."""
        key = secrets.token_urlsafe(32)
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]

    async def _serve(self, started: "Future[None]") -> None:
        app = web.Application(client_max_size=BODY_BYTES)
        for path, dialect in _PATHS.items():
            app.router.add_post(path, partial(self._complete, dialect))
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, lingering_time=_LINGERING_SECONDS)
        await runner.setup()
        server = runner.server
        assert server is not None

        def connected() -> asyncio.BaseProtocol:
            return server() if len(server.connections) < MOST_CONNECTIONS else _Full()

        await asyncio.get_running_loop().create_server(connected, sock=self._socket)
        started.set_result(None)
        await asyncio.Event().wait()

    def _session(self, request: web.Request) -> Session:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        given = key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")  # Anthropic's
        session = self._sessions.get(given)
        if session is None:
            raise CallRefused("this key is that of no rollout, or of one that has ended", status=401)
        return session

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._session(request)
        except CallRefused as refusal:
            return _refused(refusal, chat)
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def _complete(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        try:
            session = self._session(request)
            call = dialect.parse(await self._body(request))
        except CallRefused as refusal:
            return _refused(refusal, dialect)
        try:
            answer = await _result(session.ask(call))
            return await _respond(request, answer, call, dialect)
        except CallRefused as refusal:
            return _refused(refusal, dialect)
        except BaseException:  # the client has gone
            session.withdraw(call)
            raise

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._body_seconds):
                return await request.read()
        except TimeoutError:
            raise CallRefused("the body did not arrive in time") from None
        except web.HTTPRequestEntityTooLarge:
            raise CallRefused(f"the body has more than {BODY_BYTES} bytes", status=413) from None


class _Full(asyncio.Protocol):
    """Closes a connection beyond those that are served."""

    def connection_made(self, transport: Any) -> None:
        transport.abort()


def _refused(refusal: CallRefused, dialect: Dialect) -> web.Response:
    response = web.json_response(dialect.refusal_json(refusal), status=refusal.status)
    response.force_close()
    return response


async def _result(future: "Future[Answer]") -> Answer:
    """Wait for an answer. Raise CallRefused if the rollout ends first."""
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # the client has gone
            raise
        raise CallRefused("the rollout has ended", status=401) from None


async def _respond(request: web.Request, answer: Answer, call: Call, dialect: Dialect) -> web.StreamResponse:
    response: web.StreamResponse
    if call.stream:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in dialect.to_stream(call, answer):
            await response.write(event)
    else:
        response = web.json_response(dialect.to_json(call, answer))
        await response.prepare(request)
    await response.write_eof()
    return response
