"""vLLM behind `swift rollout`. Rank 0 speaks to the servers; the other ranks take part only in exporting weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from swift.utils import get_logger

from swift_megatron_grpo.config import SamplingConfig, ServerConfig
from swift_megatron_grpo.generation.interface import AdapterConfig, Generation, NamedWeights, Progress, Request, Share
from swift_megatron_grpo.generation.remote.client import Refused, ServerFailure
from swift_megatron_grpo.generation.remote.conversation_settings import differences
from swift_megatron_grpo.generation.remote.event_loop import EventLoopThread
from swift_megatron_grpo.generation.remote.generation import RemoteGeneration
from swift_megatron_grpo.generation.remote.servers import NoServer, Server, Servers, refusal
from swift_megatron_grpo.generation.remote.weight_sender import WeightConnection, WeightSender
from swift_megatron_grpo.protocol.held_weights import WorkerWeights
from swift_megatron_grpo.protocol.messages import CONFLICT, NO_WEIGHTS, SERVER_UNUSABLE

T = TypeVar("T")
logger = get_logger()

_TRIES = 2  # of what a server that is well refuses, before the run stops


@dataclass(frozen=True)
class _Transfer:
    """New weights on their way to one server."""

    server: Server
    connection: WeightConnection
    reply: Future[dict[str, Any]]


class RemoteVllm:
    def __init__(self, config: ServerConfig, sender: WeightSender, rank: int) -> None:
        self.share = Share(index=0, of=1, reports=rank == 0)
        self.memory_to_wake = 0
        self._config, self._sender = config, sender
        self._events: EventLoopThread | None = None
        self._version = NO_WEIGHTS  # of the newest weights
        self._lacking: list[Server] = []  # when `needs_weights` was asked last
        self._failed_syncs: list[str] = []  # of the newest weights, by servers that are well
        self._generations: list[RemoteGeneration] = []  # that run, oldest first
        if rank == 0:
            self._events = EventLoopThread("rollout servers")
            self._servers = Servers(config)
            self._events.run(self._servers.open())

    def check(self) -> bool:
        """Every server of this run is there and suits it; before the trainer loads a model. Returns whether their
        environments grade, as far as this rank knows."""
        return self._events is not None and self._events.run(self._check())

    async def _check(self) -> bool:
        results = await asyncio.gather(*map(self._problems, self._servers.all))
        problems = [problem for each in results for problem in each]
        conversations = {each.url: each.status.conversations for each in self._servers.all if each.status is not None}
        problems += differences(conversations) if not problems else []
        if problems:
            raise ValueError("\n".join(problems))
        self._servers.watch()
        return any(each is not None and each.use_gym_env for each in conversations.values())

    async def _problems(self, server: Server) -> list[str]:
        try:
            status = await self._servers.first_status(server)
        except NoServer as failure:
            return [str(failure)]
        except Refused as failure:
            return [refusal(server.url, failure)]
        return [f"rollout server {server.url}: {each}" for each in self._servers.problems(status)]

    # ---- weights

    @property
    def is_new(self) -> bool:
        return any(server.is_new for server in self._lacking)

    def needs_weights(self, version: int) -> bool:
        """Those that do now are sent the weights next; one that comes after this waits for its turn."""
        if self._events is None:
            return False
        if len(self._failed_syncs) >= _TRIES:
            raise RuntimeError(f"weights could not be sent, {_TRIES} times: " + "; then ".join(self._failed_syncs))
        self._events.run(self._servers.some())
        self._lacking = self._servers.without_weights(version)
        return bool(self._lacking)

    def load_weights(
        self, weights: NamedWeights, version: int, adapter: AdapterConfig | None, collect_checksums: bool
    ) -> None:
        """Send to every server that needs them. One that fails needs weights afterwards."""
        if self._events is None:
            self._sender.send(weights, [], adapter)
            return
        began = time.monotonic()
        self._version = version
        there = [server for server in self._lacking if not server.is_out]
        transfers = self._begin(
            there, {"version": version, "lora": adapter is not None, "collect_checksums": collect_checksums}
        )
        failures = self._sender.send(weights, [each.connection for each in transfers], adapter)
        problems = []
        for transfer, failure in zip(transfers, failures, strict=True):
            server = transfer.server
            problem = self._end(server, transfer.reply, failure)
            if problem is not None:
                problems.append(f"{server.url}: {problem}")
            elif server.connection is transfer.connection:  # it was not lost meanwhile
                server.received(version, collect_checksums)
        self._failed_syncs = [*self._failed_syncs, *problems] if problems else []
        logger.info(f"weights {version} sent to {len(transfers)} servers in {time.monotonic() - began:.2f} s")

    def _begin(self, servers: Sequence[Server], asked: dict[str, Any]) -> list[_Transfer]:
        """Ask servers to receive. Returns a transfer for each server that is ready."""
        assert self._events is not None
        transfers = []
        for server in servers:
            try:
                if server.connection is None:
                    server.connection = self._sender.join(self._events.run(self._join(server)))
                connection = server.connection
            except (ServerFailure, RuntimeError) as failure:  # torch's rendezvous raises RuntimeErrors
                self._events.run(self._lose(server, f"it could not be joined: {failure}"))
                continue
            reply = self._events.start(server.client.receive(asked, timeout=self._config.request_timeout))
            reply.add_done_callback(partial(_close_if_failed, connection))
            transfers.append(_Transfer(server, connection, reply))
        return transfers

    def _end(self, server: Server, reply: Future[dict[str, Any]], failure: Exception | None) -> str | None:
        """The server has the weights; or it is out; or it says why it could not load them, and that is returned."""
        assert self._events is not None
        try:
            if failure is not None and not reply.done():
                server.drop_connection()
            reply.result()
        except ServerFailure as gone:
            if isinstance(gone, Refused) and gone.status not in SERVER_UNUSABLE:
                server.drop_connection()
                return str(gone)
            self._events.run(self._lose(server, f"it went while weights were sent: {gone}"))
            return None
        if failure is not None:
            server.drop_connection()
            return f"{type(failure).__name__}: {failure}"
        return None

    async def _join(self, server: Server) -> dict[str, Any]:
        asked = {"host": server.host, "port": server.group_port, "timeout": self._config.timeout}
        return await server.client.join(asked, timeout=self._config.timeout)

    async def _lose(self, server: Server, why: str) -> None:
        self._servers.lose(server, why)

    # ---- whether they are the trainer's

    def mark_verified(self) -> None:
        if self._events is not None:
            trusted = self._events.run(self._servers.mark_verified(self._version))
            logger.info(f"{len(trusted)} servers may generate with weights {self._version}")

    def invalidate_weights(self) -> None:
        """Those that have generated with them have passed a check, and may be generating."""
        if self._events is not None:
            for server in self._servers.with_weights(self._version):
                if not server.verified:
                    server.invalidate_weights()

    def score_text(self, tokens: Sequence[int]) -> dict[str, list[float]]:
        asked = {"tokens": list(tokens), "weights_version": self._version}
        told = self._ask_all(lambda server, timeout: server.client.score_text(asked, timeout))
        return {
            url if len(replicas) == 1 else f"{url} replica {number}": values
            for url, replicas in told.items()
            for number, values in enumerate(replicas)
        }

    def held_weights(self) -> list[WorkerWeights]:
        told = self._ask_all(lambda server, timeout: server.client.held_weights(timeout))
        return [replace(holding, engine=url) for url, workers in told.items() for holding in workers]

    def _ask_all(self, ask: Callable[[Server, float], Coroutine[Any, Any, T]]) -> dict[str, T]:
        """By url, of the servers that have the newest weights. One that gives no answer is out."""
        if self._events is None:
            return {}
        servers = self._servers.with_weights(self._version)
        return self._events.run(self._answers(servers, ask))

    async def _answers(
        self, servers: Sequence[Server], ask: Callable[[Server, float], Coroutine[Any, Any, T]]
    ) -> dict[str, T]:
        answers = await asyncio.gather(
            *(ask(server, self._config.request_timeout) for server in servers), return_exceptions=True
        )
        told = {}
        for server, answer in zip(servers, answers, strict=True):
            if isinstance(answer, Refused) and answer.status == CONFLICT:
                server.drop_connection()
            elif isinstance(answer, Refused) and answer.status not in SERVER_UNUSABLE:
                raise RuntimeError(f"rollout server {server.url} does not tell what it runs: {answer}")
            elif isinstance(answer, ServerFailure):
                self._servers.lose(server, str(answer))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                told[server.url] = answer
        return told

    # ---- completions

    def generate(self, requests: Sequence[Request], group_size: int, sampling: SamplingConfig) -> Generation:
        if self._events is None:
            return _Silence()
        older = [generation for generation in self._generations if generation.is_running]
        generation = RemoteGeneration(self._events, self._servers, requests, group_size, sampling, self._version, older)
        self._generations = [*older, generation]
        return generation

    # ---- nothing of this engine is on this machine

    def wake_weights(self) -> None: ...

    def wake_cache(self) -> None: ...

    def sleep(self) -> None: ...

    def shutdown(self) -> None:
        """What is still asked for is given up; the servers stay, for the next run."""
        if self._events is not None:
            for generation in self._generations:
                self._events.run(generation.stop())
            self._events.run(self._servers.close())
            self._events.stop()
            self._events = None


def _close_if_failed(line: WeightConnection, reply: Future[dict[str, Any]]) -> None:
    """What still sends on it would wait for a server that no longer receives."""
    if reply.cancelled() or reply.exception() is not None:
        line.close()


class _Silence:
    """What ranks that do not speak have to tell."""

    is_running = False

    def next(self, newest: int) -> Progress:
        return Progress({}, needs_weights=False)
