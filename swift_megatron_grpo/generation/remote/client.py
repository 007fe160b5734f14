"""HTTP to one rollout server. Straight to it: proxy variables are for the internet, and a server is a neighbour."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from swift_megatron_grpo.protocol.held_weights import WorkerWeights
from swift_megatron_grpo.protocol.messages import RUN_HEADER, Completion, Routes, ServerStatus, unpacked_logprobs


class ServerFailure(Exception):
    """The server gave no answer, or none that is worth anything."""


class Unreachable(ServerFailure):
    """Nobody answers there, or the connection broke."""


class Slow(Unreachable):
    """It may be alive, but gave no answer in time."""


class Refused(ServerFailure):
    """The server is there and said no."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"HTTP {status}: {reason}")
        self.status = status


class Client:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session
        self._asking: set[asyncio.Task[dict[str, Any]]] = set()

    def give_up(self) -> None:
        """Whoever waits for an answer learns that there will be none. It may be long until a connection notices."""
        for task in self._asking:
            task.cancel()

    async def status(self, timeout: float) -> ServerStatus:
        return ServerStatus.from_json(await self._ask("GET", Routes.STATUS, timeout))

    async def generate(self, asked: dict[str, Any], timeout: float) -> Completion:
        return Completion.from_json(await self._ask("POST", Routes.GENERATE, timeout, asked))

    async def join(self, asked: dict[str, Any], timeout: float) -> dict[str, Any]:
        return await self._ask("POST", Routes.JOIN, timeout, asked)

    async def receive(self, asked: dict[str, Any], timeout: float) -> dict[str, Any]:
        return await self._ask("POST", Routes.RECEIVE, timeout, asked)

    async def score_text(self, asked: dict[str, Any], timeout: float) -> list[list[float]]:
        """Of each replica of the model."""
        answer = await self._ask("POST", Routes.SCORE, timeout, asked)
        return [unpacked_logprobs(replica) for replica in answer["replicas"]]

    async def held_weights(self, timeout: float) -> list[WorkerWeights]:
        """Of each worker."""
        answer = await self._ask("GET", Routes.HELD_WEIGHTS, timeout)
        return [WorkerWeights.from_json(worker) for worker in answer["workers"]]

    async def leave(self, timeout: float) -> None:
        await self._ask("POST", Routes.LEAVE, timeout)

    async def _ask(
        self, method: str, route: str, timeout: float, asked: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        asking = asyncio.create_task(self._answer(method, route, timeout, asked))
        self._asking.add(asking)
        try:
            return await asking
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if me is None or me.cancelling():
                raise
            raise Unreachable("it was given up") from None
        finally:
            self._asking.discard(asking)

    async def _answer(self, method: str, route: str, timeout: float, asked: dict[str, Any] | None) -> dict[str, Any]:
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.request(method, self.url + route, json=asked, timeout=limit) as response:
                if response.status != 200:
                    raise Refused(response.status, await _reason(response))
                answer: dict[str, Any] = await response.json()
                return answer
        except TimeoutError as error:
            raise Slow(f"no answer within {timeout:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error


async def _reason(response: aiohttp.ClientResponse) -> str:
    text = await response.text()
    try:
        said = await response.json()
        return str(said["detail"])
    except (aiohttp.ClientError, ValueError, KeyError, TypeError):
        return text[:500]


def make_session(api_key: str | None, run: str) -> aiohttp.ClientSession:
    """Inside the event loop that will use it."""
    headers = {RUN_HEADER: run} | ({} if api_key is None else {"Authorization": f"Bearer {api_key}"})
    # One connection for each completion in flight. None is kept: a server may close one just as it is used again.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(headers=headers, connector=connector, trust_env=False)
