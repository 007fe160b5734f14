"""vLLM behind `swift rollout`. Rank 0 speaks to the servers; the other ranks take part only in exporting weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from swift.utils import get_logger

from swift_megatron_grpo.config import SamplingConfig, ServerConfig
from swift_megatron_grpo.generation.asking import RemoteGeneration
from swift_megatron_grpo.generation.background import Background
from swift_megatron_grpo.generation.client import Refused, ServerFailure
from swift_megatron_grpo.generation.engine import AdapterConfig, Generation, NamedWeights, News, Request, Share
from swift_megatron_grpo.generation.servers import Line, NoServer, Server, Servers, problems_of, refusal
from swift_megatron_grpo.wire import NO_WEIGHTS, PROTOCOL

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
        self._failed_syncs: list[str] = []  # of the newest weights, by servers that are well
        if rank == 0:
            self._background = Background("rollout servers")
            self._servers = Servers(config)
            self._background.run(self._servers.open())

    def check(self) -> None:
        """Every server of this run is there and suits it; before the trainer loads a model."""
        if self._background is not None:
            self._background.run(self._check())

    async def _check(self) -> None:
        results = await asyncio.gather(*map(self._problems, self._servers.all))
        problems = [problem for each in results for problem in each]
        if problems:
            raise ValueError("\n".join(problems))
        self._servers.watch()

    async def _problems(self, server: Server) -> list[str]:
        try:
            status = await self._servers.first_status(server)
        except NoServer as failure:
            return [str(failure)]
        except Refused as failure:
            return [refusal(server.url, failure)]
        return [f"rollout server {server.url}: {each}" for each in problems_of(status, self._config, PROTOCOL)]

    # ---- weights

    def lacks(self, version: int) -> bool:
        if self._background is None:
            return False
        if len(self._failed_syncs) >= _TRIES:
            raise RuntimeError(f"weights could not be sent, {_TRIES} times: " + "; then ".join(self._failed_syncs))
        self._background.run(self._servers.some())
        return bool(self._servers.without_weights(version))

    def load_weights(self, weights: NamedWeights, version: int, adapter: AdapterConfig | None) -> None:
        """To every server that is there and has others. One that fails is without weights, which `lacks` tells."""
        if self._background is None:
            self._transport.send(weights, [], adapter)
            return
        began = time.monotonic()
        self._version = version
        receiving = self._begin(self._servers.without_weights(version), version, adapter)
        failures = self._transport.send(weights, [server.line for server, _ in receiving], adapter)
        self._failed_syncs.extend(
            f"{server.url}: {problem}"
            for (server, reply), failure in zip(receiving, failures, strict=True)
            if (problem := self._end(server, reply, version, failure)) is not None
        )
        if len(receiving) == len(self._servers.with_weights(version)):
            self._failed_syncs.clear()
        self._background.run(self._servers.tell_change())
        logger.info(f"weights {version} sent to {len(receiving)} servers in {time.monotonic() - began:.2f} s")

    def _begin(
        self, servers: Sequence[Server], version: int, adapter: AdapterConfig | None
    ) -> list[tuple[Server, Future[dict[str, Any]]]]:
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
            asked = {"version": version, "lora": adapter is not None}
            reply = self._background.start(server.client.receive(asked, timeout=self._config.request_timeout))
            reply.add_done_callback(partial(_close_if_failed, line))
            receiving.append((server, reply))
        return receiving

    def _end(
        self, server: Server, reply: Future[dict[str, Any]], version: int, failure: Exception | None
    ) -> str | None:
        """The server has the weights; or it is out; or it says why it could not load them, and that is returned."""
        assert self._background is not None
        try:
            if failure is not None and not reply.done():
                server.drop_line()
            reply.result()
        except Refused as refused:
            server.drop_line()
            return str(refused)
        except ServerFailure as gone:
            self._background.run(self._lose(server, f"it went while weights were sent: {gone}"))
            return None
        if failure is not None:
            server.drop_line()
            return f"{type(failure).__name__}: {failure}"
        server.weights_version = version
        return None

    async def _join(self, server: Server) -> dict[str, Any]:
        asked = {"host": server.host, "port": server.group_port, "timeout": self._config.timeout}
        return await server.client.join(asked, timeout=self._config.timeout)

    async def _lose(self, server: Server, why: str) -> None:
        self._servers.lose(server, why)

    # ---- completions

    def generate(self, requests: Sequence[Request], unit: int, sampling: SamplingConfig) -> Generation:
        if self._background is None:
            return _Silence()
        return RemoteGeneration(self._background, self._servers, requests, unit, sampling, self._version)

    # ---- nothing of this engine is on this machine

    def wake_weights(self) -> None: ...

    def wake_cache(self) -> None: ...

    def sleep(self) -> None: ...

    def shutdown(self) -> None:
        if self._background is not None:
            self._background.run(self._servers.close())
            self._background.stop()


def _close_if_failed(line: Line, reply: Future[dict[str, Any]]) -> None:
    """What still sends on it would wait for a server that no longer receives."""
    if reply.cancelled() or reply.exception() is not None:
        line.close()


class _Silence:
    """What ranks that do not speak have to tell."""

    def next(self) -> News:
        return News({}, lacks_weights=False)
