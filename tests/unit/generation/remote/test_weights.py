"""Weights sent to real web servers over gloo: one that is gone or not reached does not keep them from the others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
import torch
from aiohttp import web

from swift_megatron_grpo.generation.protocol.messages import NO_WEIGHTS, Routes
from swift_megatron_grpo.generation.remote.engine import RemoteVllm
from swift_megatron_grpo.generation.remote.servers import EventLoopThread
from swift_megatron_grpo.generation.remote.weight_sender import WeightSender
from swift_megatron_grpo.weights.transport.buckets import unpack
from swift_megatron_grpo.weights.transport.channel import Channel
from swift_megatron_grpo.weights.transport.rendezvous import Hub, Rendezvous, new_secret
from tests.unit.arguments.test_server_checks import CONFIG, status

CPU = torch.device("cpu")
WEIGHTS = [("a", torch.arange(7.0)), ("b", torch.ones(5, 3))]


class Receiver:
    """A server that receives weights. `fault`: what happens to it once it has agreed to."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.received: list[str] = []
        self.joins = 0

    async def open(self) -> str:
        app = web.Application()
        app.router.add_get(Routes.STATUS, self._status)
        app.router.add_post(Routes.JOIN, self._join)
        app.router.add_post(Routes.RECEIVE, self._receive)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        self._site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await self._site.start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(asdict(status()))

    async def _join(self, _: web.Request) -> web.Response:
        self.joins += 1
        if self.fault == "answers nonsense":
            return web.json_response({"host": "127.0.0.1", "port": None})
        hub = Hub("127.0.0.1", 0, 2, secret := new_secret())
        rendezvous = Rendezvous("127.0.0.1", hub.port, 2, secret, timeout=20.0)
        if self.fault:
            hub.close()
        else:
            self._thread = threading.Thread(target=self._receive_all, args=(rendezvous,), daemon=True)
            self._thread.start()
        if self.fault == "is killed":
            await self._site.stop()  # this response is its last one
        return web.json_response(asdict(rendezvous))

    def _receive_all(self, rendezvous: Rendezvous) -> None:
        channel = Channel(rendezvous, 1, CPU)
        while not (message := channel.receive())[0].get("end"):
            self.received += [name for name, _ in unpack(*message)]
        channel.close()

    async def _receive(self, _: web.Request) -> web.Response:
        await asyncio.to_thread(self._thread.join)
        return web.json_response({})


@pytest.fixture
def events() -> Iterator[EventLoopThread]:
    thread = EventLoopThread("test")
    yield thread
    thread.stop()


def engine_of(events: EventLoopThread, receivers: list[Receiver]) -> RemoteVllm:
    urls = tuple(events.run(receiver.open()) for receiver in receivers)
    config = replace(CONFIG, urls=urls, group_ports=(0,) * len(urls), timeout=20, request_timeout=20)
    engine = RemoteVllm(config, WeightSender(CPU, 2**18), rank=0)
    engine.check()
    return engine


def close(events: EventLoopThread, engine: RemoteVllm, receivers: list[Receiver]) -> None:
    engine.shutdown()
    for receiver in receivers:
        events.run(receiver.runner.cleanup())


def send(engine: RemoteVllm) -> None:
    assert engine.needs_weights(7)
    engine.load_weights(iter(WEIGHTS), 7, None, collect_checksums=False)


@pytest.mark.parametrize("fault", ["is killed", "answers nonsense"])
def test_a_server_that_fails_before_the_connection_is_lost_alone(events: EventLoopThread, fault: str) -> None:
    receivers = [Receiver(fault), Receiver()]
    engine = engine_of(events, receivers)
    send(engine)
    failed, healthy = engine._servers.all
    assert failed.is_lost and failed.weights_version == NO_WEIGHTS
    assert healthy.weights_version == 7 and receivers[1].received == ["a", "b"]
    close(events, engine, receivers)


def test_servers_that_are_not_reached_end_the_run_at_the_second_attempt(events: EventLoopThread) -> None:
    """Otherwise a firewall would make them lost and found forever."""
    receivers = [Receiver("is not reached"), Receiver("is not reached"), Receiver()]
    engine = engine_of(events, receivers)
    send(engine)
    assert [server.weights_version for server in engine._servers.all] == [NO_WEIGHTS, NO_WEIGHTS, 7]
    send(engine)
    with pytest.raises(RuntimeError, match=r"failed 2 times: http://.*Connection refused.*--vllm_server_group_port"):
        engine.needs_weights(7)
    assert [receiver.joins for receiver in receivers] == [2, 2, 1]
    close(events, engine, receivers)
