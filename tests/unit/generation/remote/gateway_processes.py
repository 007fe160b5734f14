"""Processes for tests of gateways: ranks of a run that trains nothing, and servers that receive weights with faults."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from aiohttp import web

from swift_megatron_grpo.generation.protocol.messages import Routes
from swift_megatron_grpo.generation.remote.engine import RemoteVllm
from swift_megatron_grpo.generation.remote.gateways import Gateway, GatewayConnection, Gateways
from swift_megatron_grpo.generation.remote.weight_sender import WeightSender
from swift_megatron_grpo.runtime.parallel import Coordinator, connected_to_store
from swift_megatron_grpo.weights.transport.buckets import NamedWeights, unpack
from swift_megatron_grpo.weights.transport.channel import Channel
from swift_megatron_grpo.weights.transport.rendezvous import Hub, Rendezvous, new_secret
from tests.unit.arguments.test_server_checks import CONFIG, status

CPU = torch.device("cpu")
BUCKET, TENSORS = 2**20, 48  # 48 MB: more than the buffers of sockets take while a server receives nothing


def weights(version: int) -> NamedWeights:
    return [(f"tensor {place}", torch.full((BUCKET // 4,), float(version * 100 + place))) for place in range(TENSORS)]


class Server:
    """A server with a fault in its first transfer. It writes what it has received, as JSON, after each one."""

    def __init__(self, fault: str, file: Path) -> None:
        self.fault, self._file = fault, file
        self._joins = 0
        self._channel: Future[Channel] = Future()

    async def open(self) -> None:
        app = web.Application()
        app.router.add_get(Routes.STATUS, self._status)
        app.router.add_post(Routes.JOIN, self._join)
        app.router.add_post(Routes.RECEIVE, self._receive)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        write(self._file.with_suffix(".url"), f"http://127.0.0.1:{runner.addresses[0][1]}")

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(asdict(status()))

    async def _join(self, request: web.Request) -> web.Response:
        self._joins += 1
        if self.fault == "hangs before it is joined":
            os.kill(os.getpid(), signal.SIGSTOP)
        hub = Hub("127.0.0.1", 0, 2, secret := new_secret())
        limit = 2.0 if self._joins == 1 and self.fault == "wrong secret" else 60.0
        rendezvous = Rendezvous("127.0.0.1", hub.port, 2, secret, limit)
        write(self._file.with_suffix(".secret"), secret)
        self._channel = Future()
        if self._joins == 1 and self.fault == "out of reach":
            hub.close()
        else:
            threading.Thread(target=self._meet, args=(rendezvous, self._channel), daemon=True).start()
        if self.fault == "killed before it is joined":
            response = web.json_response(asdict(rendezvous))
            await response.prepare(request)
            await response.write_eof()
            os.kill(os.getpid(), signal.SIGKILL)
        if self._joins == 1 and self.fault == "wrong secret":
            rendezvous = replace(rendezvous, secret=new_secret())
        return web.json_response(asdict(rendezvous))

    def _meet(self, rendezvous: Rendezvous, channel: Future[Channel]) -> None:
        try:
            channel.set_result(Channel(rendezvous, 1, CPU))
        except (RuntimeError, OSError) as error:
            channel.set_exception(error)

    async def _receive(self, _: web.Request) -> web.Response:
        return await asyncio.to_thread(self._receive_all)

    def _receive_all(self) -> web.Response:
        channel, received = self._channel.result(), dict[str, float]()
        while not (message := channel.receive())[0].get("end"):
            received |= {name: tensor.mean().item() for name, tensor in unpack(*message)}
            fault, self.fault = self.fault, ""
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "hangs":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "refuses":  # and leaves its end of the channel open
                return web.json_response({"detail": "it cannot load these weights"}, status=400)
        write(self._file, json.dumps({"joins": self._joins, "received": received, "message": message[0]}))
        return web.json_response({})


def serve(fault: str, file: str) -> None:
    asyncio.run(_serve(Server(fault, Path(file))))


async def _serve(server: Server) -> None:
    await server.open()
    await asyncio.Event().wait()


def train(urls: list[str], transfers: int, fault: str, folder: str, seconds: float) -> None:
    """Be a rank that sends weights so many times. `fault`: of rank 1. Rank 0 writes the state of its servers."""
    dist.init_process_group("gloo")
    ranks, sender = Coordinator(timedelta(seconds=120)), WeightSender(CPU, BUCKET)
    config = replace(CONFIG, urls=tuple(urls), group_ports=(0,) * len(urls), timeout=seconds, request_timeout=60)
    store, before = connected_to_store(), listening()
    gateways: Gateways | Gateway = Gateway(ranks, sender, store)
    if ranks.rank == 0:
        gateways = Gateways(ranks, store, {url: place % 2 for place, url in enumerate(urls)})
    engine = RemoteVllm(config, sender, ranks.rank, gateways=gateways)
    ranks.all_gather_or_raise(engine.check, "reaching servers")
    states: list[dict[str, Any]] = []
    for version in range(transfers):
        needed = any(ranks.all_gather(engine.needs_weights(version)))
        began, sent = time.monotonic(), weights(version)
        if needed:
            engine.load_weights(killed_after(sent) if fault and ranks.rank == 1 else sent, version, {"r": 8}, False)
        if ranks.rank == 0:
            servers = [
                {"version": one.weights_version, "lost": one.loss_reason if one.is_lost else None,
                 "gateway": one.connection.gateway if isinstance(one.connection, GatewayConnection) else 0}
                for one in engine._servers.all
            ]  # fmt: skip
            states.append({"seconds": time.monotonic() - began, "servers": servers, "problems": engine._failed_syncs})
            write(Path(folder, "states.json"), json.dumps(states))
        ranks.all_gather(None)
    write(Path(folder, f"rank{ranks.rank}.json"), json.dumps(sorted(listening() - before)))
    stranger = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
    write(Path(folder, f"rank{ranks.rank}.store"), repr(stranger.multi_get(stranger.list_keys())))
    ranks.all_gather(None)
    engine.shutdown()


def listening() -> set[tuple[str, int]]:
    """Return the addresses on which this process listens."""
    return {
        (one.laddr.ip, one.laddr.port) for one in psutil.Process().net_connections("inet") if one.status == "LISTEN"
    }


def killed_after(sent: NamedWeights) -> NamedWeights:
    """Kill this rank in the middle of an export."""
    for place, pair in enumerate(sent):
        if place == TENSORS // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        yield pair


def write(file: Path, text: str) -> None:
    part = file.with_suffix(".part")
    part.write_text(text)
    part.rename(file)
