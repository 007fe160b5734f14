"""vLLM behind `swift rollout`. Rank 0 speaks to the servers; the other ranks take part only in exporting weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from swift.utils import get_logger

from swift_megatron_grpo.config import SamplingConfig, ServerConfig
from swift_megatron_grpo.generation.interface import AdapterConfig, Generation, NamedWeights, News, Request, Share
from swift_megatron_grpo.generation.remote.client import Refused, ServerFailure
from swift_megatron_grpo.generation.remote.conversation_settings import differences
from swift_megatron_grpo.generation.remote.event_loop import Background
from swift_megatron_grpo.generation.remote.generation import RemoteGeneration
from swift_megatron_grpo.generation.remote.servers import Line, NoServer, Server, Servers, refusal
from swift_megatron_grpo.protocol.held_weights import Holding
from swift_megatron_grpo.protocol.messages import CONFLICT, NO_WEIGHTS, USELESS

T = TypeVar("T")
logger = get_logger()

_TRIES = 2  # of what a server that is well refuses, before the run stops


class Transport(Protocol):
    """How weights travel: weights/remote.py."""

    def join(self, rendezvous: dict[str, Any]) -> Line: ...

    def send(
        self, weights: NamedWeights, lines: Sequence[Any], adapter: AdapterConfig | None
    ) -> list[Exception | None]:
        """To all lines at once. Goes through all of `weights`, whatever happens: other ranks export with this one."""
        ...


class RemoteVllm:
    def __init__(self, config: ServerConfig, transport: Transport, rank: int) -> None:
        self.share = Share(index=0, of=1, speaks=rank == 0)
        self.memory_to_wake = 0
        self._config, self._transport = config, transport
        self._background: Background | None = None
        self._version = NO_WEIGHTS  # of the newest weights
        self._lacking: list[Server] = []  # when `lacks` was asked last
        self._failed_syncs: list[str] = []  # of the newest weights, by servers that are well
        self._generations: list[RemoteGeneration] = []  # that run, oldest first
        if rank == 0:
            self._background = Background("rollout servers")
            self._servers = Servers(config)
            self._background.run(self._servers.open())

    def check(self) -> bool:
        """Every server of this run is there and suits it; before the trainer loads a model. Returns whether their
        environments grade, as far as this rank knows."""
        return self._background is not None and self._background.run(self._check())

    async def _check(self) -> bool:
        results = await asyncio.gather(*map(self._problems, self._servers.all))
        problems = [problem for each in results for problem in each]
        leading = {each.url: each.status.leading for each in self._servers.all if each.status is not None}
        problems += differences(leading) if not problems else []
        if problems:
            raise ValueError("\n".join(problems))
        self._servers.watch()
        return any(each is not None and each.use_gym_env for each in leading.values())

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

    def lacks(self, version: int) -> bool:
        """Those that do now are sent the weights next; one that comes after this waits for its turn."""
        if self._background is None:
            return False
        if len(self._failed_syncs) >= _TRIES:
            raise RuntimeError(f"weights could not be sent, {_TRIES} times: " + "; then ".join(self._failed_syncs))
        self._background.run(self._servers.some())
        self._lacking = self._servers.without_weights(version)
        return bool(self._lacking)

    def load_weights(self, weights: NamedWeights, version: int, adapter: AdapterConfig | None, accounted: bool) -> None:
        """To every server that lacks them. One that fails is without weights, which `lacks` tells."""
        if self._background is None:
            self._transport.send(weights, [], adapter)
            return
        began = time.monotonic()
        self._version = version
        there = [server for server in self._lacking if not server.is_out]
        receiving = self._begin(there, {"version": version, "lora": adapter is not None, "accounted": accounted})
        lines = [server.line for server, _ in receiving]
        failures = self._transport.send(weights, lines, adapter)
        problems = []
        for (server, reply), line, failure in zip(receiving, lines, failures, strict=True):
            problem = self._end(server, reply, failure)
            if problem is not None:
                problems.append(f"{server.url}: {problem}")
            elif server.line is line:  # it was not lost meanwhile
                server.received(version, accounted)
        self._failed_syncs = [*self._failed_syncs, *problems] if problems else []
        logger.info(f"weights {version} sent to {len(receiving)} servers in {time.monotonic() - began:.2f} s")

    def _begin(self, servers: Sequence[Server], asked: dict[str, Any]) -> list[tuple[Server, Future[dict[str, Any]]]]:
        """Those that are ready to receive, each with its answer to come."""
        assert self._background is not None
        receiving = []
        for server in servers:
            try:
                if server.line is None:
                    server.line = self._transport.join(self._background.run(self._join(server)))
                line = server.line
            except (ServerFailure, RuntimeError) as failure:  # torch's rendezvous raises RuntimeErrors
                self._background.run(self._lose(server, f"it could not be joined: {failure}"))
                continue
            reply = self._background.start(server.client.receive(asked, timeout=self._config.request_timeout))
            reply.add_done_callback(partial(_close_if_failed, line))
            receiving.append((server, reply))
        return receiving

    def _end(self, server: Server, reply: Future[dict[str, Any]], failure: Exception | None) -> str | None:
        """The server has the weights; or it is out; or it says why it could not load them, and that is returned."""
        assert self._background is not None
        try:
            if failure is not None and not reply.done():
                server.drop_line()
            reply.result()
        except ServerFailure as gone:
            if isinstance(gone, Refused) and gone.status not in USELESS:
                server.drop_line()
                return str(gone)
            self._background.run(self._lose(server, f"it went while weights were sent: {gone}"))
            return None
        if failure is not None:
            server.drop_line()
            return f"{type(failure).__name__}: {failure}"
        return None

    async def _join(self, server: Server) -> dict[str, Any]:
        asked = {"host": server.host, "port": server.group_port, "timeout": self._config.timeout}
        return await server.client.join(asked, timeout=self._config.timeout)

    async def _lose(self, server: Server, why: str) -> None:
        self._servers.lose(server, why)

    # ---- whether they are the trainer's

    def trust(self) -> None:
        if self._background is not None:
            trusted = self._background.run(self._servers.trust(self._version))
            logger.info(f"{len(trusted)} servers may generate with weights {self._version}")

    def distrust(self) -> None:
        """Those that have generated with them have passed a check, and may be generating."""
        if self._background is not None:
            for server in self._servers.with_weights(self._version):
                if not server.trusted:
                    server.distrust()

    def score(self, tokens: Sequence[int]) -> dict[str, list[float]]:
        asked = {"tokens": list(tokens), "weights_version": self._version}
        told = self._ask_all(lambda server, timeout: server.client.score(asked, timeout))
        return {
            url if len(replicas) == 1 else f"{url} replica {number}": values
            for url, replicas in told.items()
            for number, values in enumerate(replicas)
        }

    def holdings(self) -> list[Holding]:
        told = self._ask_all(lambda server, timeout: server.client.holdings(timeout))
        return [replace(holding, engine=url) for url, workers in told.items() for holding in workers]

    def _ask_all(self, ask: Callable[[Server, float], Coroutine[Any, Any, T]]) -> dict[str, T]:
        """By url, of the servers that have the newest weights. One that gives no answer is out."""
        if self._background is None:
            return {}
        servers = self._servers.with_weights(self._version)
        return self._background.run(self._answers(servers, ask))

    async def _answers(
        self, servers: Sequence[Server], ask: Callable[[Server, float], Coroutine[Any, Any, T]]
    ) -> dict[str, T]:
        answers = await asyncio.gather(
            *(ask(server, self._config.request_timeout) for server in servers), return_exceptions=True
        )
        told = {}
        for server, answer in zip(servers, answers, strict=True):
            if isinstance(answer, Refused) and answer.status == CONFLICT:
                server.drop_line()
            elif isinstance(answer, Refused) and answer.status not in USELESS:
                raise RuntimeError(f"rollout server {server.url} does not tell what it runs: {answer}")
            elif isinstance(answer, ServerFailure):
                self._servers.lose(server, str(answer))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                told[server.url] = answer
        return told

    # ---- completions

    def generate(self, requests: Sequence[Request], unit: int, sampling: SamplingConfig) -> Generation:
        if self._background is None:
            return _Silence()
        older = [generation for generation in self._generations if generation.runs]
        generation = RemoteGeneration(self._background, self._servers, requests, unit, sampling, self._version, older)
        self._generations = [*older, generation]
        return generation

    # ---- nothing of this engine is on this machine

    def wake_weights(self) -> None: ...

    def wake_cache(self) -> None: ...

    def sleep(self) -> None: ...

    def shutdown(self) -> None:
        """What is still asked for is given up; the servers stay, for the next run."""
        if self._background is not None:
            for generation in self._generations:
                self._background.run(generation.stop())
            self._background.run(self._servers.close())
            self._background.stop()
            self._background = None


def _close_if_failed(line: Line, reply: Future[dict[str, Any]]) -> None:
    """What still sends on it would wait for a server that no longer receives."""
    if reply.cancelled() or reply.exception() is not None:
        line.close()


class _Silence:
    """What ranks that do not speak have to tell."""

    runs = False

    def next(self, newest: int) -> News:
        return News({}, lacks_weights=False)
