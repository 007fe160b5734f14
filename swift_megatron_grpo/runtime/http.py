"""Requests to servers: their failures by kind, responses of limited size, and new tries of what may pass.

Servers may be slow, restart, and respond with anything. Proxy variables are ignored: servers are on the local network.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp

T = TypeVar("T")
SHOWN = 1000  # characters of a server's reason
_MOST_OF_REASON = 2**20  # bytes that are read of it
_PAUSES = (0.5, 1.0, 2.0, 5.0)  # seconds before each new try; the last one is repeated
_PASSING = (408, 429, 500, 502, 503, 504)  # HTTP statuses of a server that is busy or starts


class ServerFailure(Exception):
    """A request to the server failed."""


class Unreachable(ServerFailure):
    """Connecting to the server failed, or the connection broke."""


class RequestTimeout(Unreachable):
    """The server sent no response in time; it may be alive."""


class InvalidResponse(ServerFailure):
    """The server sent a response that it cannot have meant: invalid JSON, other types, impossible values."""


class Refused(ServerFailure):
    """The server is alive and rejected the request."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"HTTP {status}: {reason}")
        self.status = status


def open_session(headers: dict[str, str], api_key: str | None) -> aiohttp.ClientSession:
    """Create a session; call this inside the event loop that will use it."""
    key = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    # One connection per request in flight. None is kept alive: a server may close one just as it is reused.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(headers=headers | key, connector=connector, trust_env=False)


@asynccontextmanager
async def respond(
    session: aiohttp.ClientSession, method: str, address: str, timeout: float, body: dict[str, Any]
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send a request. Raise ServerFailure unless the server accepts it and the response arrives completely."""
    limit = aiohttp.ClientTimeout(total=timeout)
    try:
        async with session.request(method, address, timeout=limit, **body) as response:
            if response.status != 200:
                raise Refused(response.status, await _reason(response))
            yield response
    except TimeoutError as error:
        raise RequestTimeout(f"no response within {timeout:.0f} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise Unreachable(f"{type(error).__name__}: {error}") from error


async def limited_object(
    session: aiohttp.ClientSession, method: str, address: str, timeout: float, most: int, body: dict[str, Any]
) -> dict[str, Any]:
    """Send a request and read a JSON object of at most this many bytes. A redirection is refused, not followed."""
    async with respond(session, method, address, timeout, {"allow_redirects": False, **body}) as response:
        content = await start_of(response, most + 1)
    if len(content) > most:
        raise InvalidResponse(f"its response has more than {most} bytes")
    return json_object(content.decode(errors="replace"))


async def served_model(session: aiohttp.ClientSession, url: str, timeout: float) -> dict[str, Any]:
    """Return what a server with OpenAI's routes tells about its first model: at least its `id`, a text."""
    body = await limited_object(session, "GET", url + "/v1/models", timeout, 2**20, {})
    try:
        [served, *_] = body["data"]
        if not isinstance(served["id"], str):
            raise TypeError("its id is not a text")
    except (LookupError, TypeError, ValueError) as error:
        raise InvalidResponse(f"its list of models cannot be read: {type(error).__name__}: {error}") from error
    return dict(served)


async def repeated(ask: Callable[[float], Awaitable[T]], seconds: float, flag: str) -> T:
    """Repeat a request that may succeed later, for the seconds of a flag. `ask` gets the seconds that are left."""
    end, tries = time.monotonic() + seconds, 0
    while True:
        try:
            return await ask(max(end - time.monotonic(), 0.1))
        except ServerFailure as problem:
            may_pass = isinstance(problem, Unreachable) or (isinstance(problem, Refused) and problem.status in _PASSING)
            pause = _PAUSES[min(tries, len(_PAUSES) - 1)]
            if not may_pass:
                raise
            if time.monotonic() + pause >= end:
                raise ServerFailure(f"after {tries + 1} tries in {seconds:g} s ({flag}): {problem}") from problem
        tries += 1
        await asyncio.sleep(pause)


def json_object(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidResponse(f"its response is not valid JSON: {text[:100]!r}") from None
    if not isinstance(body, dict):
        raise InvalidResponse(f"its response is not a JSON object: {text[:100]!r}")
    return body


async def start_of(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the first bytes of a response, which may have any size."""
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) >= most:
            break
    return bytes(content[:most])


async def _reason(response: aiohttp.ClientResponse) -> str:
    text = (await start_of(response, _MOST_OF_REASON)).decode(errors="replace")
    try:
        return str(json_object(text)["detail"])[:SHOWN]
    except (InvalidResponse, KeyError):
        return text[:SHOWN]
