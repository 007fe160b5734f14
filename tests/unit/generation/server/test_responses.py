"""The lines that answer a batch."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import HTTPException

from swift_megatron_grpo.generation.server.responses import answer_lines


class Engine:
    """Completes a request when the test releases it."""

    def __init__(self, requests: int) -> None:
        self.released = [asyncio.Event() for _ in range(requests)]
        self.cancelled: list[int] = []

    async def complete(self, request: int) -> dict[str, Any]:
        try:
            await self.released[request].wait()
        except asyncio.CancelledError:
            self.cancelled.append(request)
            raise
        if request == 1:
            raise HTTPException(410, "new weights")
        if request == 2:
            raise RuntimeError("a secret")
        return {"text": str(request)}


def test_each_request_is_answered_when_it_ends_and_those_at_the_same_time_together() -> None:
    async def read() -> None:
        engine = Engine(4)
        chunks = answer_lines(range(4), engine.complete)
        engine.released[3].set()
        assert _lines(await anext(chunks)) == [{"place": 3, "completion": {"text": "3"}}]
        for place in range(3):
            engine.released[place].set()
        refused = {"place": 1, "status": 410, "detail": "new weights"}
        failed = {"place": 2, "status": 500, "detail": "the server failed; its log has the reason"}
        assert _lines(await anext(chunks)) == [{"place": 0, "completion": {"text": "0"}}, refused, failed]
        assert await anext(chunks, None) is None

    asyncio.run(read())


def test_requests_without_an_answer_are_cancelled_when_the_client_leaves() -> None:
    async def leave() -> None:
        engine = Engine(4)
        engine.released[0].set()
        chunks = answer_lines(range(4), engine.complete)
        await anext(chunks)
        await chunks.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        assert engine.cancelled == [1, 2, 3]

    asyncio.run(leave())


def _lines(chunk: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in chunk.splitlines()]
