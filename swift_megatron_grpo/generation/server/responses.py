"""Responses to requests that take long: each part is sent as soon as it is known, and a client may leave before.

The response to a batch is lines of JSON, in any order. A line has `place`, the request's place in the batch, and either
`completion` or `status` and `detail`, with which the request alone would have been refused.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from swift.utils import get_logger

T = TypeVar("T")
logger = get_logger()
_CLIENT_CLOSED_REQUEST = 499  # the status that web servers log for it; it is never received


async def answer_lines(
    requests: Sequence[T], complete: Callable[[T], Awaitable[dict[str, Any]]]
) -> AsyncIterator[bytes]:
    """Yield lines, several together if they are known at the same time. Ending this early cancels the rest."""
    known: asyncio.Queue[bytes] = asyncio.Queue()

    async def respond(place: int, request: T) -> None:
        known.put_nowait(json.dumps({"place": place} | await _outcome(complete(request))).encode() + b"\n")

    tasks = [asyncio.create_task(respond(place, request)) for place, request in enumerate(requests)]
    try:
        missing = len(tasks)
        while missing:
            lines = [await known.get()]
            while not known.empty():
                lines.append(known.get_nowait())
            missing -= len(lines)
            yield b"".join(lines)
    finally:
        for task in tasks:
            task.cancel()


async def _outcome(completing: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"completion": await completing}
    except HTTPException as refusal:
        return {"status": refusal.status_code, "detail": refusal.detail}
    except Exception:
        logger.exception("a request of a batch failed")
        return {"status": 500, "detail": "the server failed; its log has the reason"}


async def while_connected(client: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await the work, and cancel it if the client disconnects. The request body must have been read."""
    working, disconnecting = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(client))
    try:
        await asyncio.wait([working, disconnecting], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(_CLIENT_CLOSED_REQUEST, "the client has disconnected")
        return working.result()
    finally:
        working.cancel()
        disconnecting.cancel()


async def _disconnect(client: Request) -> None:
    while (await client.receive())["type"] != "http.disconnect":
        pass
