"""The rollout servers of a run: which are alive, and with which weights. Used inside one event loop.

Every server is polled for its status each second. A server that does not respond is lost until it responds again. If
it was restarted in the meantime, it must be sent the weights before it may generate.
"""

import asyncio
import os
import secrets
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

import aiohttp
from swift.utils import get_logger

from swift_megatron_grpo.generation.interface import AnsweredRequest
from swift_megatron_grpo.generation.protocol import messages
from swift_megatron_grpo.generation.remote.client import Client, ImageUploads, make_session
from swift_megatron_grpo.generation.remote.compatibility import conflicts_between, problems_of, unreachable
from swift_megatron_grpo.generation.remote.gateways import GatewayConnection
from swift_megatron_grpo.generation.remote.weight_sender import WeightConnection
from swift_megatron_grpo.runtime.failures import SharedFailure
from swift_megatron_grpo.runtime.http import InvalidResponse, Refused, RequestTimeout, ServerFailure
from swift_megatron_grpo.settings.config import ServerConfig

T = TypeVar("T")
logger = get_logger()

MAX_ATTEMPTS = 2  # per request or weight transfer that healthy servers refuse, before the run stops
_POLL_SECONDS = 1.0
_ANSWERED = 20_000  # requests, for a trace


class EventLoopThread:
    """An asyncio event loop in a daemon thread, for callers that are not asynchronous."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.submit(coroutine).result()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class NoServer(SharedFailure):
    """No rollout server is left, and none has come back in time."""


class Server:
    """The state of one server. `status` is None while it is lost."""

    def __init__(self, client: Client, group_port: int) -> None:
        self.client = client
        self.url = client.url
        self.group_port = group_port
        self.status: messages.ServerStatus | None = None
        self.weights_version = messages.NO_WEIGHTS
        self.verified_version = messages.NO_WEIGHTS  # of the newest weights that are known to be the trainer's
        self.checked_instance: str | None = None  # the instance that has completed a checksummed load
        self.excluded_instance: str | None = None  # not used again, because its responses were wrong
        self.connection: WeightConnection | GatewayConnection | None = None
        self.requests_in_flight = 0  # of all generations
        self.images = ImageUploads(client)
        self.loss_reason = "not contacted yet"
        self.last_response = self.lost_since = time.monotonic()

    @property
    def is_lost(self) -> bool:
        return self.status is None

    @property
    def is_new(self) -> bool:
        """True until this instance of the server has completed a checksummed load."""
        return self.status is None or self.status.instance != self.checked_instance

    @property
    def verified(self) -> bool:
        """True if its weights are known to be the trainer's."""
        return self.weights_version == self.verified_version != messages.NO_WEIGHTS

    @property
    def generates(self) -> bool:
        """True if it may work on requests: also while newer weights arrive, or are checked, in flight."""
        return self.verified_version != messages.NO_WEIGHTS

    def received(self, version: int, collect_checksums: bool, in_flight: bool = False) -> None:
        assert self.status is not None
        self.weights_version = version
        if not in_flight:
            self.verified_version = messages.NO_WEIGHTS
        if collect_checksums:
            self.checked_instance = self.status.instance

    def invalidate_weights(self) -> None:
        self.weights_version = self.verified_version = messages.NO_WEIGHTS

    def drop_connection(self) -> None:
        """Close the connection for weights. They are invalid from now on, so they will be sent again."""
        if self.connection is not None:
            self.connection.close()
        self.connection = None
        self.invalidate_weights()


def do_nothing() -> None: ...


class Servers:
    """All servers of a run, and the tasks that poll them."""

    def __init__(self, config: ServerConfig, check_stop: Callable[[], None] = do_nothing) -> None:
        self.config = config
        self.check_stop = check_stop  # raises if the run stops and cannot wait
        # The name identifies this run to readers of the servers' logs, the secret to the servers.
        name = f"{socket.gethostname()}, process {os.getpid()}, {uuid.uuid4().hex[:8]}"
        self.run = messages.RunIdentity(name, secrets.token_hex(16))
        self.all: list[Server] = []
        self.at_start: Mapping[str, messages.ServerStatus] = {}  # by URL, once they have passed the check of the run
        self.newest = messages.NO_WEIGHTS  # version of the last weights that were sent
        self.listeners: list[Callable[[], None]] = []  # called after a server was lost, came back, or has free capacity
        self.answered: deque[AnsweredRequest] = deque(maxlen=_ANSWERED)  # the newest, for --trace_steps
        self._polling: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._session = session = make_session(self.config.api_key, self.run)
        self.adopt([Client(url, session) for url in self.config.urls])

    def adopt(self, clients: Sequence[Client]) -> None:
        self.all = [Server(client, port) for client, port in zip(clients, self.config.group_ports, strict=True)]

    def start_polling(self) -> None:
        self._polling = [asyncio.create_task(self._poll(server)) for server in self.all]

    async def close(self) -> None:
        for task in self._polling:
            task.cancel()
        for server in self.all:
            server.drop_connection()
        # A server that this does not reach ends the lease of this run after RUN_IDLE_SECONDS.
        await asyncio.gather(*(server.client.leave(timeout=2) for server in self.present), return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    @property
    def present(self) -> list[Server]:
        return [server for server in self.all if not server.is_lost]

    def with_weights(self, version: int) -> list[Server]:
        return [server for server in self.present if server.weights_version == version]

    def verified_servers(self, version: int) -> list[Server]:
        return [server for server in self.with_weights(version) if server.verified]

    def version_to_request(self, version: int) -> int:
        """Return `version` while any server generates with it, otherwise the newest version in use.

        If no server is left with it and the trainer has moved on, servers only get the trainer's newer weights.
        """
        in_use = {server.weights_version for server in self.present if server.verified}
        return version if version in in_use else max(in_use | {version})

    def generating_from(self, version: int) -> list[Server]:
        """Return the servers that may generate with these weights, or with newer ones if those arrive in flight."""
        if not self.config.updates_in_flight:
            return self.verified_servers(version)
        return [server for server in self.present if server.generates and server.weights_version >= version]

    def without_weights(self, version: int) -> list[Server]:
        return [server for server in self.present if server.weights_version != version]

    # ---- availability

    async def wait_for_status(self, server: Server) -> messages.ServerStatus:
        """Wait for a server to start, up to the configured timeout, and briefly for another run on it to end."""
        began = time.monotonic()
        logged = False
        while True:
            try:
                status = await server.client.status(timeout=5)
                other = self._other_run(status)
                if other is None or time.monotonic() - began > messages.RUN_IDLE_SECONDS + 5:
                    server.status, server.last_response = status, time.monotonic()
                    return status
                if not logged:
                    logger.info(
                        f"rollout server {server.url} serves another run ({other}); waiting for that run to end"
                    )
                    logged = True
            except Refused:
                raise
            except ServerFailure as failure:
                waited = time.monotonic() - began
                if waited >= self.config.timeout:
                    raise NoServer(unreachable(server.url, waited, str(failure))) from failure
            await asyncio.sleep(_POLL_SECONDS)

    async def wait_for_any(self) -> None:
        """Wait until at least one server is present."""
        while not self.present:
            self.check_stop()
            self.raise_if_timed_out()
            await asyncio.sleep(_POLL_SECONDS / 4)

    def raise_if_timed_out(self) -> None:
        """Raise NoServer if all servers have been lost for longer than --vllm_server_timeout."""
        lost_since = max(server.lost_since for server in self.all)
        waited = time.monotonic() - lost_since
        if not self.present and waited > self.config.timeout:
            reasons = "; ".join(f"{server.url}: {server.loss_reason}" for server in self.all)
            raise NoServer(
                f"no rollout server has answered for {waited:.0f} s (--vllm_server_timeout {self.config.timeout:.0f}): "
                f"{reasons}. Start `swift rollout` again, then resume this run from its last checkpoint"
            )

    async def mark_verified(self, version: int) -> list[Server]:
        """Allow all servers with these weights to generate. Return them."""
        verified = self.with_weights(version)
        for server in verified:
            server.verified_version = version
        self.notify_listeners()
        return verified

    async def invalidate_unverified(self, version: int) -> None:
        """Take these weights, which are not the trainer's, from servers where they have not passed a check."""
        for server in self.with_weights(version):
            if not server.verified:
                server.invalidate_weights()
        self.notify_listeners()

    def notify_listeners(self) -> None:
        for listener in self.listeners:
            listener()

    def mark_lost(self, server: Server, reason: str) -> None:
        """Stop using a server and fail its requests, until it responds again."""
        if server.is_lost:
            return
        server.status = None
        server.loss_reason, server.lost_since = reason, time.monotonic()
        server.drop_connection()
        server.client.cancel_requests()
        logger.warning(f"rollout server {server.url} is lost: {reason}; {len(self.present)} of {len(self.all)} remain")
        self.notify_listeners()

    async def _poll(self, server: Server) -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            try:
                status = await server.client.status(timeout=max(5.0, self.config.timeout / 4))
            except RequestTimeout as failure:  # its CPU may be busy
                if time.monotonic() - server.last_response > self.config.timeout:
                    self.mark_lost(server, str(failure))
            except ServerFailure as failure:
                self.mark_lost(server, str(failure))
            except Exception as error:  # a server that is not polled any more would never be lost, nor come back
                logger.exception(f"polling the rollout server {server.url} failed")
                self.mark_lost(server, f"polling it failed: {type(error).__name__}: {error}")
            else:
                self._handle_status(server, status)

    def blame(self, server: Server, failure: ServerFailure) -> bool:
        """Stop using a server as a failed request demands. Return False if it is healthy and refused this request."""
        if isinstance(failure, InvalidResponse):
            self.exclude(server, str(failure))
        elif isinstance(failure, Refused) and failure.status == messages.CONFLICT:
            server.drop_connection()  # it has weights of another sender; it will be sent ours again
        elif isinstance(failure, Refused) and failure.status not in messages.SERVER_UNUSABLE:
            return False
        else:
            self.mark_lost(server, str(failure))
        return True

    async def still_runs(self, server: Server) -> bool:
        """Return True if a server that was in use responds, and was not restarted. Otherwise it is lost, or was."""
        before = server.status
        try:
            self._handle_status(server, await server.client.status(timeout=5))
        except ServerFailure as failure:
            self.mark_lost(server, str(failure))
        return before is not None and server.status is not None and server.status.instance == before.instance

    def exclude(self, server: Server, reason: str) -> None:
        """Stop using a server, in this run, until it is restarted: its responses are wrong."""
        if server.status is not None:
            server.excluded_instance = server.status.instance
            self.mark_lost(server, f"{reason}; it is not used again before it is restarted")

    def _handle_status(self, server: Server, status: messages.ServerStatus) -> None:
        now = server.last_response = time.monotonic()
        if server.status is not None and server.status.instance != status.instance:
            self.mark_lost(server, "it was restarted")
        if server.status is not None and self._other_run(status) is not None:
            self.mark_lost(server, "; ".join(self.problems(status)))
        if not server.is_lost or status.instance == server.excluded_instance:
            return
        problems = "; ".join(self.problems(status))  # it may have been restarted with other flags
        if not problems:
            logger.warning(f"rollout server {server.url} is back after {now - server.lost_since:.1f} s")
            server.status = status
            self.notify_listeners()
        elif problems != server.loss_reason:
            server.loss_reason = problems
            logger.warning(f"rollout server {server.url} responds again but cannot be used: {problems}")

    def problems(self, status: messages.ServerStatus) -> list[str]:
        """Return the reasons why a server cannot serve this run, including another run on it.

        What the run leaves to the servers must stay as it was at the start.
        """
        other = self._other_run(status)
        if other is not None:
            return [messages.serves_another(other)]
        return problems_of(status, self.config) or conflicts_between({**self.at_start, "this one": status})

    def _other_run(self, status: messages.ServerStatus) -> str | None:
        """Return the run that the server serves, unless that is this run."""
        return None if status.run == self.run.name else status.run
