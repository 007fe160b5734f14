"""Work for a client that may go before it is done: out of time, or killed. Nobody would read the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import HTTPException, Request

T = TypeVar("T")
_CLIENT_GONE = 499  # as web servers note it; nobody receives it


async def while_connected(client: Request, work: Coroutine[Any, Any, T]) -> T:
    """Cancels the work when the connection ends. The request's body has been read."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_departure(client))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(_CLIENT_GONE, "the client has gone")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _departure(client: Request) -> None:
    while (await client.receive())["type"] != "http.disconnect":
        pass
