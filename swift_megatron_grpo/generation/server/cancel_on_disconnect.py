"""Cancellation of work whose client has disconnected (timeout, or killed), so that no process reads the response."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import HTTPException, Request

T = TypeVar("T")
_CLIENT_CLOSED_REQUEST = 499  # the status that web servers log for it; it is never received


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
