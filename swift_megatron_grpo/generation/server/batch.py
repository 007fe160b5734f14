"""The answers to a batch of requests, as lines of JSON: each is sent as soon as it is known, in any order.

A line has `place`, the request's place in the batch, and either `completion` or `status` and `detail`, with which the
request alone would have been refused.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from fastapi import HTTPException
from swift.utils import get_logger

T = TypeVar("T")
logger = get_logger()


async def answer_lines(
    requests: Sequence[T], complete: Callable[[T], Awaitable[dict[str, Any]]]
) -> AsyncIterator[bytes]:
    """Yield the answers, several together if they are known at the same time. Ending this early cancels the rest."""
    answers: asyncio.Queue[bytes] = asyncio.Queue()

    async def answer(place: int, request: T) -> None:
        answers.put_nowait(json.dumps({"place": place} | await _outcome(complete(request))).encode() + b"\n")

    tasks = [asyncio.create_task(answer(place, request)) for place, request in enumerate(requests)]
    try:
        missing = len(tasks)
        while missing:
            lines = [await answers.get()]
            while not answers.empty():
                lines.append(answers.get_nowait())
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
