"""The rollout servers of a run: which of them are there, and with which weights. Lives in one event loop.

Each server is asked for its status every second. One that does not answer is out, and comes back by itself when it
answers again; if it was started anew in the meantime it has to be sent the weights before it may generate.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import aiohttp
from swift.utils import get_logger

from swift_megatron_grpo.config import ServerConfig
from swift_megatron_grpo.failures import SharedFailure
from swift_megatron_grpo.generation.remote.client import Client, Refused, ServerFailure, Slow, make_session
from swift_megatron_grpo.generation.remote.conversation_settings import disagreements
from swift_megatron_grpo.generation.remote.weight_sender import WeightConnection
from swift_megatron_grpo.protocol.messages import NO_WEIGHTS, PROTOCOL, RUN_IDLE_SECONDS, ServerStatus, serves_another

logger = get_logger()

_EVERY = 1.0  # seconds between two looks at a server
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


class NoServer(SharedFailure):
    """No rollout server is left, and none has come back in time."""


class Server:
    """What the trainer knows of one server. `status` is None while it is out."""

    def __init__(self, client: Client, group_port: int) -> None:
        self.client = client
        self.url = client.url
        self.group_port = group_port
        self.status: ServerStatus | None = None
        self.weights_version = NO_WEIGHTS
        self.verified = False  # those weights are known to be the trainer's
        self.checked_instance: str | None = None  # the instance that has collect_checksums for a load
        self.connection: WeightConnection | None = None
        self.asked = 0  # requests that it is answering, of all generations
        self.why_out = "not asked yet"
        self.last_answer = self.out_since = time.monotonic()

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def is_out(self) -> bool:
        return self.status is None

    @property
    def is_new(self) -> bool:
        return self.status is None or self.status.instance != self.checked_instance

    def received(self, version: int, collect_checksums: bool) -> None:
        assert self.status is not None
        self.weights_version, self.verified = version, False
        if collect_checksums:
            self.checked_instance = self.status.instance

    def invalidate_weights(self) -> None:
        self.weights_version, self.verified = NO_WEIGHTS, False

    def drop_connection(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None
        self.invalidate_weights()


class Servers:
    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        # by which servers tell this run from others, and people in a log
        self.run = f"{socket.gethostname()}, process {os.getpid()}, {uuid.uuid4().hex[:8]}"
        self.all: list[Server] = []
        self.listeners: list[Callable[[], None]] = []  # called after a server came, went, or has a slot more
        self._watching: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._session = session = make_session(self.config.api_key, self.run)
        self.adopt([Client(url, session) for url in self.config.urls])

    def adopt(self, clients: Sequence[Client]) -> None:
        self.all = [Server(client, port) for client, port in zip(clients, self.config.group_ports, strict=True)]

    def watch(self) -> None:
        self._watching = [asyncio.create_task(self._watch(server)) for server in self.all]

    async def close(self) -> None:
        for task in self._watching:
            task.cancel()
        for server in self.all:
            server.drop_connection()
        # One that does not answer notices the silence.
        await asyncio.gather(*(server.client.leave(timeout=2) for server in self.present), return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    @property
    def present(self) -> list[Server]:
        return [server for server in self.all if not server.is_out]

    def with_weights(self, version: int) -> list[Server]:
        return [server for server in self.present if server.weights_version == version]

    def verified_servers(self, version: int) -> list[Server]:
        return [server for server in self.with_weights(version) if server.verified]

    def version_to_ask(self, version: int) -> int:
        """This one, while a server generates with it. When none is left, and the trainer has moved on, its newer
        weights go to the servers instead: then those."""
        found = {server.weights_version for server in self.present if server.verified}
        return version if version in found else max(found | {version})

    def without_weights(self, version: int) -> list[Server]:
        return [server for server in self.present if server.weights_version != version]

    # ---- coming and going

    async def first_status(self, server: Server) -> ServerStatus:
        """Waits for it to start, as long as the configuration allows, and a little for another run to be over."""
        began = time.monotonic()
        told = False
        while True:
            try:
                status = await server.client.status(timeout=5)
                other = self._other_run(status)
                if other is None or time.monotonic() - began > RUN_IDLE_SECONDS + 5:
                    server.status, server.last_answer = status, time.monotonic()
                    return status
                if not told:
                    logger.info(f"rollout server {server.url} serves another run ({other}); waiting for its end")
                    told = True
            except Refused:
                raise
            except ServerFailure as failure:
                waited = time.monotonic() - began
                if waited >= self.config.timeout:
                    raise NoServer(_unreachable(server.url, waited, str(failure))) from failure
            await asyncio.sleep(_EVERY)

    async def some(self) -> None:
        """Waits until one is there."""
        while not self.present:
            self.refuse_to_wait_for_ever()
            await asyncio.sleep(_EVERY / 4)

    def refuse_to_wait_for_ever(self) -> None:
        out_since = max(server.out_since for server in self.all)
        waited = time.monotonic() - out_since
        if not self.present and waited > self.config.timeout:
            stories = "; ".join(f"{server.url}: {server.why_out}" for server in self.all)
            raise NoServer(
                f"no rollout server has answered for {waited:.0f} s (--vllm_server_timeout {self.config.timeout:.0f}): "
                f"{stories}. Start `swift rollout` again, then resume this run from its last checkpoint"
            )

    async def mark_verified(self, version: int) -> list[Server]:
        """Those that have these weights may generate with them."""
        trusted = self.with_weights(version)
        for server in trusted:
            server.verified = True
        self.tell_change()
        return trusted

    def tell_change(self) -> None:
        for listener in self.listeners:
            listener()

    def lose(self, server: Server, why: str) -> None:
        if server.is_out:
            return
        server.status = None
        server.why_out, server.out_since = why, time.monotonic()
        server.drop_connection()
        server.client.give_up()
        logger.warning(f"rollout server {server.url} is out: {why}; {len(self.present)} of {len(self.all)} are left")
        self.tell_change()

    async def _watch(self, server: Server) -> None:
        while True:
            await asyncio.sleep(_EVERY)
            try:
                status = await server.client.status(timeout=max(5.0, self.config.timeout / 4))
            except Slow as failure:  # its processor may be busy
                if time.monotonic() - server.last_answer > self.config.timeout:
                    self.lose(server, str(failure))
            except ServerFailure as failure:
                self.lose(server, str(failure))
            else:
                self._answered(server, status)

    def _answered(self, server: Server, status: ServerStatus) -> None:
        now = server.last_answer = time.monotonic()
        if server.status is not None and server.status.instance != status.instance:
            self.lose(server, "it was started anew")
        if server.status is not None and self._other_run(status) is not None:
            self.lose(server, "; ".join(self.problems(status)))
        if server.is_out and not self._still_suits(server, status):
            return
        if server.is_out:
            logger.warning(f"rollout server {server.url} is back after {now - server.out_since:.1f} s")
            server.status = status
            self.tell_change()

    def problems(self, status: ServerStatus) -> list[str]:
        """Why it cannot serve this run."""
        other = self._other_run(status)
        return problems_of(status, self.config, PROTOCOL) if other is None else [serves_another(other)]

    def _other_run(self, status: ServerStatus) -> str | None:
        """That it serves."""
        return None if status.run == self.run else status.run

    def _still_suits(self, server: Server, status: ServerStatus) -> bool:
        """It may have been started with another command line."""
        problems = "; ".join(self.problems(status))
        if problems and problems != server.why_out:
            server.why_out = problems
            logger.warning(f"rollout server {server.url} answers again and stays out: {problems}")
        return not problems


def _unreachable(url: str, waited: float, why: str) -> str:
    proxies = {name: os.environ[name] for each in _PROXIES for name in (each, each.upper()) if name in os.environ}
    said = ", ".join(f"{name}={value}" for name, value in proxies.items())
    hint = f" ({said} is set, and not used: servers are asked directly)" if proxies else ""
    return (
        f"rollout server {url} did not answer within {waited:.0f} s{hint}: {why}. Start it with `swift rollout --model "
        "... --port ...` (with --host, if it runs on another machine: it listens on 127.0.0.1 only), see "
        "--vllm_server_base_url or --vllm_server_host and _port, or wait longer with --vllm_server_timeout"
    )


def problems_of(status: ServerStatus, config: ServerConfig, protocol: int) -> list[str]:
    """Why this server cannot serve this run."""
    problems = []
    if status.protocol != protocol:
        return [f"it runs swift_megatron_grpo {status.plugin}, which speaks another protocol; install the same version"]
    different = [
        f"{key} is {theirs!r} there and {config.model[key]!r} here"
        for key, theirs in status.model.items()
        if key in config.model and config.model[key] != theirs
    ]
    if different:
        problems.append(f"it runs another model: {', '.join(different)}; start it with the --model of this run")
    if status.max_model_len < config.needed_length:
        problems.append(
            f"its vllm_max_model_len ({status.max_model_len}) is shorter than max_length + max_completion_length "
            f"({config.needed_length}); start it with --vllm_max_model_len {config.needed_length}"
        )
    if status.max_logprobs == 0:
        problems.append(
            "it was started with max_logprobs 0 in --vllm_engine_kwargs and cannot tell the log-probs of what it "
            "samples, which tell how far the policy has moved since; leave that out"
        )
    problems += disagreements(status.conversations, config.turns)
    if config.lora_rank is not None and not status.enable_lora:
        problems.append("--vllm_enable_lora true needs it there as well; start it with --vllm_enable_lora true")
    elif config.lora_rank is not None and status.max_lora_rank < config.lora_rank:
        problems.append(
            f"its vllm_max_lora_rank ({status.max_lora_rank}) is below --lora_rank {config.lora_rank}; start it with "
            f"--vllm_max_lora_rank {config.lora_rank}"
        )
    return problems


def refusal(url: str, failure: Refused) -> str:
    """Of the first look at a server."""
    if failure.status == 404:
        return (
            f"rollout server {url} has no swift_megatron_grpo, or it is turned off there; pip install "
            "swift-megatron-grpo in its environment and start `swift rollout` again"
        )
    if failure.status == 401:
        return (
            f"rollout server {url} wants its --api_key: {failure}; set SWIFT_ROLLOUT_API_KEY in this run's "
            "environment, or --vllm_server_api_key"
        )
    return f"rollout server {url} refused its status: {failure}"
