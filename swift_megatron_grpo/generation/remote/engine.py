"""vLLM behind `swift rollout`. Rank 0 alone contacts the servers; gateways also send them weights (gateways.py)."""

import asyncio
import base64
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from swift.template import Template
from swift.utils import get_logger

from swift_megatron_grpo.generation import interface
from swift_megatron_grpo.generation.protocol.messages import NO_WEIGHTS, SERVER_UNUSABLE
from swift_megatron_grpo.generation.remote.compatibility import conflicts_between, notes_on, refusal
from swift_megatron_grpo.generation.remote.gateways import Gateway, GatewayConnection, Gateways
from swift_megatron_grpo.generation.remote.generation import RemoteGeneration
from swift_megatron_grpo.generation.remote.servers import (
    MAX_ATTEMPTS,
    EventLoopThread,
    NoServer,
    Server,
    Servers,
    do_nothing,
)
from swift_megatron_grpo.generation.remote.weight_sender import WeightConnection, WeightSender
from swift_megatron_grpo.runtime.http import Refused, RequestTimeout, ServerFailure
from swift_megatron_grpo.settings.config import SamplingConfig, ServerConfig
from swift_megatron_grpo.types import DraftCounts, ScoredText
from swift_megatron_grpo.weights.transport.buckets import NamedWeights
from swift_megatron_grpo.weights.transport.held_weights import WorkerWeights
from swift_megatron_grpo.weights.transport.rendezvous import Rendezvous

T = TypeVar("T")
logger = get_logger()
_COUNTS_SECONDS = 10.0  # for a server to report what drafts did, which only a metric depends on
_JOIN_SECONDS = 15.0  # for a server to let a gateway join, while those that have answered wait for theirs (30 s)


class _Transfer(NamedTuple):
    """A transfer of weights to one server, in progress."""

    server: Server
    connection: WeightConnection | GatewayConnection
    response: Future[dict[str, Any]]
    in_flight: bool  # the server continues its requests


class RemoteVllm:
    """All rollout servers of the run as one engine; each server is a replica."""

    def __init__(
        self,
        config: ServerConfig,
        sender: WeightSender,
        rank: int,
        check_stop: Callable[[], None] = do_nothing,
        template: Template | None = None,
        gateways: Gateways | Gateway | None = None,
    ) -> None:
        """`check_stop` raises an exception if the run stops and waiting for servers would take too long.

        `template`: samples the videos of prompts; None: they have none. `gateways`: on rank 0 those that it directs, on
        a gateway itself; None: there are none, or this rank is none.
        """
        self._template = template
        self.share = interface.Share(index=0, of=1, reports=rank == 0)
        self.memory_to_wake = 0
        self._config, self._sender, self._gateways = config, sender, gateways
        self._events: EventLoopThread | None = None  # None: not rank 0, or shut down
        self._version = NO_WEIGHTS  # of the newest weights
        self._recipients: list[Server] = []  # servers that needed weights at the last call of `needs_weights`
        self._failed_syncs: list[str] = []  # consecutive, of the newest weights, on healthy servers
        self._whole_groups = False  # a server's scheduler answers all completions of a prompt
        self._generations: list[RemoteGeneration] = []  # running, oldest first
        if rank == 0:
            self._events = EventLoopThread("rollout servers")
            self._servers = Servers(config, check_stop)
            self._events.run(self._servers.open())

    def check(self) -> bool:
        """Raise ValueError unless every server of this run is up and compatible. Call this before loading a model.

        Returns True if the servers' environments compute rewards; always False on ranks other than 0.
        """
        return self._events is not None and self._events.run(self._check())

    async def _check(self) -> bool:
        results = await asyncio.gather(*map(self._problems, self._servers.all))
        problems = [problem for result in results for problem in result]
        statuses = {server.url: server.status for server in self._servers.all if server.status is not None}
        problems = problems or conflicts_between(statuses)
        if problems:
            raise ValueError("\n".join(problems))
        for url, status in statuses.items():
            for note in notes_on(status, self._config):
                logger.info(f"rollout server {url}: {note}")
        self._servers.at_start = statuses
        self._servers.start_polling()
        conversations = [status.conversations for status in statuses.values() if status.conversations is not None]
        self._whole_groups = any(settings.answers_groups for settings in conversations)
        return any(settings.use_gym_env for settings in conversations)

    async def _problems(self, server: Server) -> list[str]:
        try:
            status = await self._servers.wait_for_status(server)
        except NoServer as failure:
            return [str(failure)]
        except Refused as failure:
            return [refusal(server.url, failure)]
        return [f"rollout server {server.url}: {problem}" for problem in self._servers.problems(status)]

    # ---- weights

    @property
    def is_new(self) -> bool:
        return any(server.is_new for server in self._recipients)

    @property
    def held_media(self) -> frozenset[str]:
        """The kinds of media for which any server holds a part of the model; on ranks other than 0 always none."""
        if self._events is None:
            return frozenset()
        statuses = [server.status for server in self._servers.all if server.status is not None]
        return frozenset(kind for status in statuses for kind in status.held_media)

    def needs_weights(self, version: int) -> bool:
        """Return True if any server needs these weights. Servers that come later have to wait for the next transfer."""
        if self._events is None:
            return False
        if len(self._failed_syncs) >= MAX_ATTEMPTS:
            raise RuntimeError(f"sending weights failed {MAX_ATTEMPTS} times: " + "; then ".join(self._failed_syncs))
        self._events.run(self._servers.wait_for_any())
        self._recipients = self._servers.without_weights(version)
        return bool(self._recipients)

    def load_weights(
        self, weights: NamedWeights, version: int, adapter: interface.AdapterConfig | None, collect_checksums: bool
    ) -> None:
        """Send to every server that needs them. A server still needs weights if its transfer fails."""
        if isinstance(self._gateways, Gateway):
            self._gateways.send(weights, adapter)
            return
        if self._events is None:
            self._sender.send(weights, [], adapter)
            return
        began = time.monotonic()
        self._version = self._servers.newest = version
        recipients = [server for server in self._recipients if not server.is_lost]
        transfers, problems = self._begin(
            recipients, {"version": version, "lora": adapter is not None, "collect_checksums": collect_checksums}
        )
        own = [transfer.connection for transfer in transfers if isinstance(transfer.connection, WeightConnection)]
        failures: dict[WeightConnection | GatewayConnection, Exception | None] = {}
        failures |= zip(own, self._sender.send(weights, own, adapter), strict=True)
        if isinstance(self._gateways, Gateways):
            failures |= self._gateways.end([one for _, one, *_ in transfers if isinstance(one, GatewayConnection)])
        for server, connection, response, in_flight in transfers:
            problem = self._end(server, response, failures.get(connection))
            if problem is not None:
                problems.append(f"{server.url}: {problem}")
            elif server.connection is connection:  # it was not lost in the meantime
                server.received(version, collect_checksums, in_flight)
        self._failed_syncs = [*self._failed_syncs, "; ".join(problems)] if problems else []
        logger.info(f"weights {version} sent to {len(transfers)} servers in {time.monotonic() - began:.2f} s")

    def _begin(self, servers: Sequence[Server], payload: dict[str, Any]) -> tuple[list[_Transfer], list[str]]:
        """Request servers to receive weights; return transfers to those that are ready, and others' failures."""
        assert self._events is not None
        transfers, problems = list[_Transfer](), list[str]()
        has_requests = any(generation.is_running for generation in self._generations)
        if isinstance(self._gateways, Gateways):
            self._begin_on(self._gateways, servers)
            # those on which gateways send already come first: connecting to another may take 30 s
            servers = sorted((one for one in servers if not one.is_lost), key=lambda one: one.connection is None)
        for server in servers:
            try:
                connection = server.connection
                if connection is None:
                    rendezvous = self._events.run(self._open_rendezvous(server, self._config.timeout))
                    server.connection = connection = self._sender.join(rendezvous)
            except ServerFailure as failure:
                self._events.run(self._mark_lost(server, f"connecting for weights failed: {failure}"))
                continue
            except (RuntimeError, OSError) as failure:  # of torch's groups, and of sockets
                if self._events.run(self._servers.still_runs(server)):
                    reason = "this machine must reach the port that --vllm_server_group_port sets (any port by default)"
                    problems.append(f"{server.url}: connecting for weights failed ({failure}); {reason}")
                continue
            in_flight = self._config.updates_in_flight and has_requests and server.verified
            receiving = server.client.receive(payload | {"in_flight": in_flight}, timeout=self._config.request_timeout)
            response = self._events.submit(receiving)
            response.add_done_callback(partial(_close_if_failed, connection))
            transfers.append(_Transfer(server, connection, response, in_flight))
        return transfers, problems

    def _begin_on(self, gateways: Gateways, servers: Sequence[Server]) -> None:
        """Begin the transfers of gateways, and connect them to their servers. Those that cannot leave it to rank 0."""
        assert self._events is not None
        new = [server for server in servers if server.connection is None and gateways.of_server[server.url] != 0]
        answers = self._events.run(self._let_gateways_join(new))
        joining = {server.url: answer for server, answer in zip(new, answers, strict=True) if answer is not None}
        known = [one for server in servers if isinstance(one := server.connection, GatewayConnection)]
        joined = gateways.begin(known, joining)
        for server in new:
            connection = joined.get(server.url)
            if isinstance(connection, GatewayConnection):
                server.connection = connection
            elif connection is not None:
                logger.warning(f"rollout server {server.url}: rank 0 connects to it for weights ({connection})")

    async def _let_gateways_join(self, servers: Sequence[Server]) -> list[Rendezvous | None]:
        return await asyncio.gather(*map(self._let_gateway_join, servers))

    async def _let_gateway_join(self, server: Server) -> Rendezvous | None:
        try:
            return await self._open_rendezvous(server, min(self._config.timeout, _JOIN_SECONDS))
        except ServerFailure as failure:
            self._servers.mark_lost(server, f"connecting for weights failed: {failure}")
            return None

    async def _open_rendezvous(self, server: Server, limit: float) -> Rendezvous:
        """Let a server expect a sender of weights."""
        address = {"host": urlsplit(server.url).hostname or "", "port": server.group_port}
        return await server.client.join(address | {"timeout": self._config.timeout}, timeout=limit)

    def _end(self, server: Server, response: Future[dict[str, Any]], failure: Exception | None) -> str | None:
        """Wait for the end of a transfer. Return what went wrong on a healthy server; None for one that was lost."""
        assert self._events is not None
        try:
            if failure is not None and not response.done():
                server.drop_connection()
            response.result()
        except ServerFailure as error:
            if isinstance(error, Refused) and error.status not in SERVER_UNUSABLE:
                server.drop_connection()
                return str(error)
            if isinstance(error, RequestTimeout):  # weights that are sent again would wait for the same engine
                limit = f"{self._config.request_timeout:.0f} s (--vllm_request_timeout)"
                self._events.run(self._exclude(server, f"it has not loaded the weights within {limit}"))
            else:
                self._events.run(self._mark_lost(server, f"it failed while weights were sent: {error}"))
            return None
        if failure is not None:
            server.drop_connection()
            return f"{type(failure).__name__}: {failure}"
        return None

    async def _mark_lost(self, server: Server, reason: str) -> None:
        self._servers.mark_lost(server, reason)

    async def _exclude(self, server: Server, reason: str) -> None:
        self._servers.exclude(server, reason)

    # ---- verification of weights

    def mark_verified(self) -> None:
        if self._events is not None:
            verified = self._events.run(self._servers.mark_verified(self._version))
            logger.info(f"{len(verified)} servers may generate with weights {self._version}")

    def invalidate_weights(self) -> None:
        """Discard the last weights sent, except on servers that passed an earlier check and may be generating."""
        if self._events is not None:
            self._events.run(self._servers.invalidate_unverified(self._version))

    def start_scoring(self, text: ScoredText) -> Callable[[], dict[str, list[float]]]:
        files = {"image": text.image, "recording": text.recording, "video": text.video}
        media = {name: None if file is None else base64.b64encode(file).decode("ascii") for name, file in files.items()}
        payload = {"tokens": list(text.tokens), **media, "weights_version": self._version}
        by_server = self._start_requests(lambda server, timeout: server.client.score_text(payload, timeout))
        return lambda: {
            url if len(replicas) == 1 else f"{url} replica {number}": logprobs
            for url, replicas in by_server().items()
            for number, logprobs in enumerate(replicas)
        }

    def held_weights(self) -> list[WorkerWeights]:
        by_server = self._start_requests(lambda server, timeout: server.client.held_weights(timeout))
        return [replace(worker, engine=url) for url, workers in by_server().items() for worker in workers]

    def _start_requests(self, send: Callable[[Server, float], Coroutine[Any, Any, T]]) -> Callable[[], dict[str, T]]:
        """Query the servers that have the newest weights. Return a function that waits for the responses, by URL."""
        if self._events is None:
            return dict
        servers = self._servers.with_weights(self._version)
        return self._events.submit(self._responses(servers, send)).result

    async def _responses(
        self, servers: Sequence[Server], send: Callable[[Server, float], Coroutine[Any, Any, T]]
    ) -> dict[str, T]:
        results = await asyncio.gather(
            *(send(server, self._config.request_timeout) for server in servers), return_exceptions=True
        )
        responses = {}
        for server, result in zip(servers, results, strict=True):
            if isinstance(result, ServerFailure):
                if not self._servers.blame(server, result):
                    raise RuntimeError(f"rollout server {server.url} did not report which weights it runs: {result}")
            elif isinstance(result, BaseException):
                raise result
            else:
                responses[server.url] = result
        return responses

    # ---- completions

    def generate(
        self, requests: Sequence[interface.Request], group_size: int, sampling: SamplingConfig
    ) -> interface.Generation:
        if self._events is None:
            return interface.BatchGeneration(dict)  # this rank contacts no server, so it has no results
        older = [generation for generation in self._generations if generation.is_running]
        generation = RemoteGeneration(
            self._events,
            self._servers,
            requests,
            group_size,
            sampling,
            self._version,
            older,
            self._template,
            self._whole_groups,
        )
        self._generations = [*older, generation]
        return generation

    def take_draft_counts(self) -> DraftCounts:
        """Return what drafts did on servers since the last call, without those that do not respond at once."""
        if self._events is None or not self._config.drafts:
            return DraftCounts()
        return self._events.run(self._draft_counts())

    async def _draft_counts(self) -> DraftCounts:
        queries = (server.client.take_draft_counts(_COUNTS_SECONDS) for server in self._servers.present)
        counts = await asyncio.gather(*queries, return_exceptions=True)
        for problem in counts:
            if isinstance(problem, BaseException) and not isinstance(problem, ServerFailure):
                raise problem
        return sum((each for each in counts if isinstance(each, DraftCounts)), start=DraftCounts())

    # ---- no part of this engine is on this machine

    lacks_base = False  # servers do not sleep

    def load_base(self, weights: NamedWeights) -> None:
        raise NotImplementedError("servers load the base themselves")

    def wake_weights(self) -> None: ...

    def wake_cache(self) -> None: ...

    def sleep(self) -> None: ...

    def answered_requests(self) -> list[interface.AnsweredRequest]:
        if self._events is None:
            return []
        answered = self._servers.answered
        return [answered.popleft() for _ in range(len(answered))]  # the other thread may append in the meantime

    def shutdown(self) -> None:
        """Cancel unfinished requests and disconnect; the servers keep running for the next run."""
        if self._events is not None:
            for generation in self._generations:
                self._events.run(generation.stop())
            self._events.run(self._servers.close())
            self._events.stop()
            self._events = None
        if isinstance(self._gateways, Gateway):
            self._gateways.close()


def _close_if_failed(connection: WeightConnection | GatewayConnection, response: Future[dict[str, Any]]) -> None:
    """Close a connection if its server no longer receives; a thread that sends on it would block indefinitely."""
    if response.cancelled() or response.exception() is not None:
        connection.close()
