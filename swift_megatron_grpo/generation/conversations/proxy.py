"""The address at which agents call the policy: an HTTP server of this machine alone, in a thread of its own.

A key is that of one rollout, and ends with it. A call whose client disconnects is cancelled.
"""

import asyncio
import secrets
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread
from typing import Protocol

from aiohttp import web
from swift.utils import get_logger

from swift_megatron_grpo.generation.conversations.chat import Answer, Call, CallRefused, parse, to_json, to_stream

logger = get_logger()
_BODY_BYTES, _BODY_SECONDS = 2**24, 60
_START_SECONDS = 30


class Session(Protocol):
    """One rollout. Both methods are called from the thread of the proxy."""

    def ask(self, call: Call) -> "Future[Answer]":
        """Let the policy answer. Cancelling the future withdraws the call."""

    def withdraw(self, answer: Answer) -> None:
        """Forget an answer that did not reach the agent."""


class Proxy:
    def __init__(self) -> None:
        """Bind a port and start to serve."""
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
        app = web.Application(client_max_size=_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.SockSite(runner, self._socket).start()
        started.set_result(None)
        await asyncio.Event().wait()

    def _session(self, request: web.Request) -> Session:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key) if scheme.lower() == "bearer" else None
        if session is None:
            raise CallRefused("this key is that of no rollout, or of one that has ended", status=401)
        return session

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._session(request)
        except CallRefused as refusal:
            return web.json_response(refusal.to_json(), status=refusal.status)
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            session = self._session(request)
            async with asyncio.timeout(_BODY_SECONDS):
                body = await request.read()
            call = parse(body)
            answer = await _result(session.ask(call))
        except CallRefused as refusal:
            return web.json_response(refusal.to_json(), status=refusal.status)
        except TimeoutError:
            return web.json_response(CallRefused("the body did not arrive in time").to_json(), status=400)
        try:
            return await _respond(request, answer, call)
        except BaseException:  # the client has disconnected
            session.withdraw(answer)
            raise


async def _result(future: "Future[Answer]") -> Answer:
    """Wait for an answer. Raise CallRefused if the rollout ends first."""
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # the client has disconnected
            raise
        raise CallRefused("the rollout has ended", status=401) from None


async def _respond(request: web.Request, answer: Answer, call: Call) -> web.StreamResponse:
    response: web.StreamResponse
    if call.stream:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in to_stream(answer, call.model):
            await response.write(event)
    else:
        response = web.json_response(to_json(answer, call.model))
        await response.prepare(request)
    await response.write_eof()
    return response
