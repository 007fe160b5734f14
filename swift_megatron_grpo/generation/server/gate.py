"""The gate in front of all routes: limits on connections, then the key, then the size and the content of the body.

A request without the key is answered before its body is read. What reaches a route is complete, small enough and
checked by schema.py. An exception in a route is logged with an id, and the client receives the id alone.
"""

import asyncio
import hmac
import uuid
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from swift.utils import get_logger
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from swift_megatron_grpo.generation.protocol.messages import INVALID
from swift_megatron_grpo.generation.server import schema

logger = get_logger()
OPEN_ROUTES = ("/health", "/health/")  # need no key, if nothing is sent to them
_WITHOUT_BODY = ("GET", "HEAD")
_BODY = "swift_megatron_grpo.body"  # key of the scope
_LONG_BODY = 2**20  # bytes: checking it would keep the event loop from others
_HEADER_BYTES = 2**16
_HEADERS = 256  # of a request, with the trailers of a chunked body
_Base: Any = AutoHTTPProtocol  # uvicorn's protocol: which one depends on the installed packages


class Gate:
    """ASGI middleware around the whole application."""

    def __init__(
        self,
        app: ASGIApp,
        key: str | None,
        body_bytes: int,
        body_seconds: float,  # to send one body
        most_requests: int,  # in progress
        content: Callable[[], schema.ContentLimits],
    ) -> None:
        self._app, self._content = app, content
        self._key = None if not key else key.encode()
        self._body_bytes, self._body_seconds, self._most_requests = body_bytes, body_seconds, most_requests
        self._in_progress = 0  # requests with a body, and each of a batch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = False  # a failure replaces the response only before that

        async def respond(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            self._check_key(scope)
            if scope["method"] in _WITHOUT_BODY:
                await self._app(scope, receive, respond)
            else:
                await self._serve_with_body(scope, receive, respond)
            return
        except HTTPException as refusal:
            status, reason = refusal.status_code, refusal.detail
        except Exception:
            status, reason = 500, log_failure(f"{scope['method']} {scope['path']!r}")
        if not began:
            await JSONResponse({"detail": reason}, status)(scope, receive, send)

    def _check_key(self, scope: Scope) -> None:
        if self._key is None or (scope["path"] in OPEN_ROUTES and scope["method"] in _WITHOUT_BODY):
            return
        scheme, _, sent = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            raise HTTPException(401, "Missing bearer token")
        if not hmac.compare_digest(sent.encode("latin-1"), self._key):
            raise HTTPException(401, "Invalid API key")

    async def _serve_with_body(self, scope: Scope, receive: Receive, respond: Send) -> None:
        if self._in_progress >= self._most_requests:
            raise HTTPException(429, f"{self._in_progress} requests are in progress (--max_requests); retry later")
        self._in_progress += 1
        counted = 1
        try:
            body = await self._read(scope, receive)
            if scope["method"] == "POST":
                check = partial(self._checked, scope, body)
                body = check() if len(body) < _LONG_BODY else await asyncio.to_thread(check)
                more = schema.completions_of(scope.get(_BODY)) - 1
                if self._in_progress + more > self._most_requests:
                    reason = f"a request for {1 + more} completions exceeds the limit (--max_requests); retry later"
                    raise HTTPException(429, reason)
                self._in_progress += more
                counted += more
            await self._app(scope, _replay(body, receive), respond)
        finally:
            self._in_progress -= counted

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """Read the body, up to the limits of size and time."""
        limit = self._body_bytes
        declared = Headers(scope=scope).get("content-length", "0")
        if not declared.isdigit() or len(declared) > 18 or int(declared) > limit:
            raise HTTPException(413, f"the body is larger than {limit} bytes (--max_body_bytes)")
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(self._body_seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise HTTPException(400, "the client has disconnected")
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > limit:
                        raise HTTPException(413, f"the body is larger than {limit} bytes (--max_body_bytes)")
        except TimeoutError:
            reason = f"the body was not complete within {self._body_seconds:g} s (--body_timeout)"
            raise HTTPException(408, reason) from None
        return bytes(body)

    def _checked(self, scope: Scope, body: bytes) -> bytes:
        """Check the body. Return what ms-swift's routes read; this package's read the checked object."""
        path = scope["path"]
        try:
            if path in schema.STOCK_SCHEMAS:
                checked = schema.parse(body, schema.STOCK_SCHEMAS[path], self._content())
                return checked.model_dump_json(exclude_unset=True).encode()
            if path in schema.SCHEMAS:
                scope[_BODY] = schema.parse(body, schema.SCHEMAS[path], self._content())
        except schema.InvalidBody as error:
            raise HTTPException(INVALID, str(error)) from None
        return b""  # no other route reads a body


def log_failure(where: str) -> str:
    """Log the exception that is being handled, under a number. Return what the client may know of it."""
    number = uuid.uuid4().hex[:8]
    logger.exception(f"error {number} in {where}")
    return f"the server failed; its log has the reason, as error {number}"


def checked_body(scope: MutableMapping[str, Any]) -> Any:
    """Return the object that the gate has parsed from the body of this request."""
    return scope[_BODY]


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a channel that yields the body first, and then what else the client does, such as disconnecting."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def bounded_protocol(most: int, idle_seconds: float, body_bytes: int) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol, which closes idle connections, those beyond a number, and requests beyond a size.

    uvicorn leaves this to a proxy: timeout_keep_alive begins after the first request, limit_concurrency answers once
    the headers are complete, and only h11, the slower of its two protocols, limits their size. Each connection costs a
    file descriptor, and without a free one the server accepts no connection. The other protocol keeps every trailer,
    in several times its bytes, and reads on: the gate, which counts the bytes of the body, never sees one.
    """

    class BoundedProtocol(_Base):
        _received = 0  # bytes of the request in progress, or of the headers of the next one
        _counted: tuple[object, bool] = (None, True)  # the request that they belong to, and whether it has ended

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.abort()
            else:
                self._close_later(None)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            request = self.cycle, self._is_idle
            self._received = len(data) + (self._received if request == self._counted else 0)
            self._counted = request
            limit = _HEADER_BYTES + (0 if self._is_idle else body_bytes)
            if self._received > limit or len(self.headers or ()) > _HEADERS:
                self.transport.abort()

        @property
        def _is_idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _close_later(self, last_request: object) -> None:
            self.loop.call_later(idle_seconds, self._close_if_idle, last_request)

        def _close_if_idle(self, last_request: object) -> None:
            """Close the connection unless a request has begun since `last_request` or is in progress."""
            if self.transport.is_closing():
                return
            if self._is_idle and self.cycle is last_request:
                self.transport.abort()
            else:
                self._close_later(self.cycle)

    return BoundedProtocol
