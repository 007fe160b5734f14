"""HTTP client of one rollout server."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp

from swift_megatron_grpo.generation.protocol.messages import (
    Completion,
    Routes,
    RunIdentity,
    ServerStatus,
    unpacked_logprobs,
)
from swift_megatron_grpo.runtime.http import (
    SHOWN,
    InvalidResponse,
    Refused,
    Unreachable,
    json_object,
    open_session,
    respond,
    start_of,
)
from swift_megatron_grpo.types import DraftCounts
from swift_megatron_grpo.weights.transport.held_weights import WorkerWeights
from swift_megatron_grpo.weights.transport.rendezvous import Rendezvous

T = TypeVar("T")
_MOST_BYTES = 2**29  # of a response, or of one completion's line: its experts may have hundreds of MB
Accept = Callable[[int, Completion | Refused], None]  # receives a request's place in its batch


class Client:
    """The routes of one server as methods. All of them raise ServerFailure."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session
        self._in_flight: set[asyncio.Task[Any]] = set()

    def cancel_requests(self) -> None:
        """Make all requests in flight raise Unreachable at once; a dead connection may take long to be noticed."""
        for task in self._in_flight:
            task.cancel()

    async def status(self, timeout: float) -> ServerStatus:
        return _read("its status", ServerStatus.from_json, await self._request("GET", Routes.STATUS, timeout))

    async def generate_batch(self, payloads: Sequence[dict[str, Any]], timeout: float, accept: Accept) -> None:
        """Send requests together. Call `accept` with the place and the response of each, as soon as it arrives."""
        await self._cancellable(self._receive_batch(payloads, timeout, accept))

    async def _receive_batch(self, payloads: Sequence[dict[str, Any]], timeout: float, accept: Accept) -> None:
        missing, unfinished = set(range(len(payloads))), b""
        address, body = self.url + Routes.GENERATE_BATCH, {"json": {"requests": payloads}}
        async with respond(self._session, "POST", address, timeout, body) as response:
            async for chunk in response.content.iter_any():
                *lines, unfinished = (unfinished + chunk).split(b"\n")
                if len(unfinished) > _MOST_BYTES:
                    raise InvalidResponse(f"a line of its response has more than {_MOST_BYTES} bytes")
                for line in lines:
                    place, completion = _parse_line(line, missing)
                    missing.remove(place)
                    accept(place, completion)
        if missing:
            raise Unreachable(f"the response ended before {len(missing)} of its completions")

    async def put_image(self, digest: str, content: bytes, timeout: float) -> None:
        await self._request("PUT", Routes.IMAGES + digest, timeout, content)

    async def join(self, payload: dict[str, Any], timeout: float) -> Rendezvous:
        response = await self._request("POST", Routes.JOIN, timeout, payload)
        return _read("its rendezvous", Rendezvous.from_json, response)

    async def receive(self, payload: dict[str, Any], timeout: float) -> dict[str, Any]:
        return await self._request("POST", Routes.RECEIVE, timeout, payload)

    async def take_draft_counts(self, timeout: float) -> DraftCounts:
        response = await self._request("POST", Routes.DRAFTS, timeout)
        return _read("its counts of drafts", lambda body: DraftCounts(**{n: int(body[n]) for n in body}), response)

    async def score_text(self, payload: dict[str, Any], timeout: float) -> list[list[float]]:
        """Return the log-probs of each replica of the model."""
        response = await self._request("POST", Routes.SCORE, timeout, payload)
        return _read("its log-probs", lambda body: list(map(unpacked_logprobs, body["replicas"])), response)

    async def held_weights(self, timeout: float) -> list[WorkerWeights]:
        response = await self._request("GET", Routes.HELD_WEIGHTS, timeout)
        return _read("its list of weights", lambda body: list(map(WorkerWeights.from_json, body["workers"])), response)

    async def leave(self, timeout: float) -> None:
        await self._request("POST", Routes.LEAVE, timeout)

    async def _request(
        self, method: str, route: str, timeout: float, payload: dict[str, Any] | bytes | None = None
    ) -> dict[str, Any]:
        async def send() -> dict[str, Any]:
            body = {"data": payload} if isinstance(payload, bytes) else {"json": payload}
            async with respond(self._session, method, self.url + route, timeout, body) as response:
                content = await start_of(response, _MOST_BYTES + 1)
                if len(content) > _MOST_BYTES:
                    raise InvalidResponse(f"its response has more than {_MOST_BYTES} bytes")
                return json_object(content.decode(errors="replace"))

        return await self._cancellable(send())

    async def _cancellable(self, request: Coroutine[Any, Any, T]) -> T:
        """Await a request that `cancel_requests` can cancel."""
        task = asyncio.create_task(request)
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


class ImageUploads:
    """Images on their way to one server: each is sent once, however many requests name it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._sent: dict[str, asyncio.Task[None]] = {}  # by digest

    async def send(self, files: Mapping[str, bytes], timeout: float) -> None:
        """Send what has not been sent, or whose upload failed. Requests that need the same image share one upload."""
        uploads = []
        for digest, content in files.items():
            upload = self._sent.get(digest)
            if upload is None or (upload.done() and (upload.cancelled() or upload.exception() is not None)):
                upload = asyncio.create_task(self._client.put_image(digest, content, timeout))
                self._sent[digest] = upload
            uploads.append(upload)
        for upload in uploads:
            await asyncio.shield(upload)

    def forget(self, files: Mapping[str, bytes]) -> None:
        """Send these images again when they are needed: the server does not have them."""
        for digest in files:
            self._sent.pop(digest, None)


def _read(what: str, convert: Callable[[dict[str, Any]], T], body: dict[str, Any]) -> T:
    """Convert a response; raise InvalidResponse for whatever the conversion raises."""
    try:
        return convert(body)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidResponse(f"{what} cannot be read: {type(error).__name__}: {error}") from error


def _parse_line(line: bytes, missing: Collection[int]) -> tuple[int, Completion | Refused]:
    """Return the place of a request in its batch, and its completion or refusal."""

    def parse(message: dict[str, Any]) -> tuple[int, Completion | Refused]:
        place = message["place"]
        if type(place) is not int or place not in missing:
            raise ValueError(f"no request has place {place!r:.100}")
        if "completion" in message:
            return place, Completion.from_json(message["completion"])
        return place, Refused(int(message["status"]), str(message["detail"])[:SHOWN])

    return _read("its completion", parse, json_object(line.decode(errors="replace")))


def make_session(api_key: str | None, run: RunIdentity) -> aiohttp.ClientSession:
    """Create a session; call this inside the event loop that will use it."""
    return open_session(run.headers, api_key)
