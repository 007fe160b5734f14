"""HTTP client of one rollout server. It ignores proxy variables, because servers are on the local network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp

from swift_megatron_grpo.protocol.held_weights import WorkerWeights
from swift_megatron_grpo.protocol.messages import Completion, Routes, RunIdentity, ServerStatus, unpacked_logprobs

_SHOWN = 1000  # characters of a server's reason


class ServerFailure(Exception):
    """A request to the server failed."""


class Unreachable(ServerFailure):
    """Connecting to the server failed, or the connection broke."""


class RequestTimeout(Unreachable):
    """The server sent no response in time; it may be alive."""


class InvalidResponse(ServerFailure):
    """The server sent a response that it cannot have meant: no JSON, other types, impossible values."""


class Refused(ServerFailure):
    """The server is alive and rejected the request."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"HTTP {status}: {reason}")
        self.status = status


class Client:
    """The routes of one server as methods. All of them raise ServerFailure."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session
        self._in_flight: set[asyncio.Task[dict[str, Any]]] = set()

    def cancel_requests(self) -> None:
        """Make all requests in flight raise Unreachable at once; a dead connection may take long to be noticed."""
        for task in self._in_flight:
            task.cancel()

    async def status(self, timeout: float) -> ServerStatus:
        response = await self._request("GET", Routes.STATUS, timeout)
        with _as_invalid("its status"):
            return ServerStatus.from_json(response)

    async def generate(self, payload: dict[str, Any], timeout: float) -> Completion:
        response = await self._request("POST", Routes.GENERATE, timeout, payload)
        with _as_invalid("its completion"):
            return Completion.from_json(response)

    async def put_media(self, digest: str, content: bytes, timeout: float) -> None:
        await self._request("PUT", Routes.MEDIA + digest, timeout, content)

    async def join(self, payload: dict[str, Any], timeout: float) -> dict[str, Any]:
        return await self._request("POST", Routes.JOIN, timeout, payload)

    async def receive(self, payload: dict[str, Any], timeout: float) -> dict[str, Any]:
        return await self._request("POST", Routes.RECEIVE, timeout, payload)

    async def score_text(self, payload: dict[str, Any], timeout: float) -> list[list[float]]:
        """Return the log-probs of each replica of the model."""
        response = await self._request("POST", Routes.SCORE, timeout, payload)
        with _as_invalid("its log-probs"):
            return [unpacked_logprobs(replica) for replica in response["replicas"]]

    async def held_weights(self, timeout: float) -> list[WorkerWeights]:
        """Return what each worker holds."""
        response = await self._request("GET", Routes.HELD_WEIGHTS, timeout)
        with _as_invalid("its list of weights"):
            return [WorkerWeights.from_json(worker) for worker in response["workers"]]

    async def leave(self, timeout: float) -> None:
        await self._request("POST", Routes.LEAVE, timeout)

    async def _request(
        self, method: str, route: str, timeout: float, payload: dict[str, Any] | bytes | None = None
    ) -> dict[str, Any]:
        """Send a request that `cancel_requests` can cancel."""
        task = asyncio.create_task(self._send(method, route, timeout, payload))
        self._in_flight.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            raise Unreachable("the request was cancelled because the server is lost") from None
        finally:
            self._in_flight.discard(task)

    async def _send(
        self, method: str, route: str, timeout: float, payload: dict[str, Any] | bytes | None
    ) -> dict[str, Any]:
        body = {"data": payload} if isinstance(payload, bytes) else {"json": payload}
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.request(method, self.url + route, timeout=limit, **body) as response:
                if response.status != 200:
                    raise Refused(response.status, await _reason(response))
                return _json_object(await response.text(errors="replace"))
        except TimeoutError as error:
            raise RequestTimeout(f"no response within {timeout:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error


@contextmanager
def _as_invalid(what: str) -> Iterator[None]:
    """Raise InvalidResponse for whatever the conversion of a response raises."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidResponse(f"{what} cannot be read: {type(error).__name__}: {error}") from error


def _json_object(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidResponse(f"its response is no JSON: {text[:100]!r}") from None
    if not isinstance(body, dict):
        raise InvalidResponse(f"its response is no JSON object: {text[:100]!r}")
    return body


async def _reason(response: aiohttp.ClientResponse) -> str:
    text = await response.text(errors="replace")
    try:
        return str(_json_object(text)["detail"])[:_SHOWN]
    except (InvalidResponse, KeyError):
        return text[:_SHOWN]


def make_session(api_key: str | None, run: RunIdentity) -> aiohttp.ClientSession:
    """Create a session; call this inside the event loop that will use it."""
    headers = run.headers | ({} if api_key is None else {"Authorization": f"Bearer {api_key}"})
    # One connection per completion in flight. None is kept alive: a server may close one just as it is reused.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(headers=headers, connector=connector, trust_env=False)
