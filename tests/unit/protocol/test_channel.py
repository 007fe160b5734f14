"""Weights from one process to another: real processes over gloo, and what happens when one of them dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swift_megatron_grpo.generation.remote.weight_sender import WeightConnection, WeightSender
from swift_megatron_grpo.protocol.buckets import buckets, unpack
from swift_megatron_grpo.protocol.channel import Channel, Rendezvous, listen

pytestmark = pytest.mark.alone

CPU = torch.device("cpu")
WEIGHTS = [
    ("a", torch.arange(7, dtype=torch.bfloat16)),
    ("b", torch.randn(5, 3)),
    ("scalar", torch.tensor(2.5)),
    ("bytes", torch.arange(3, dtype=torch.uint8)),
    ("c", torch.randn(40, 40).t()),
]


@given(st.integers(1, 10_000))
def test_buckets_hold_everything_bit_by_bit(nbytes: int) -> None:
    parts = list(buckets(iter(WEIGHTS), nbytes))
    there = [pair for bucket in parts for pair in unpack(bucket.header, bucket.data)]
    assert [name for name, _ in there] == [name for name, _ in WEIGHTS]
    for (_, sent), (_, received) in zip(WEIGHTS, there, strict=True):
        assert received.dtype == sent.dtype and torch.equal(received, sent)
    for bucket in parts:
        assert len(bucket.entries) == 1 or sum(entry.nbytes for entry in bucket.entries) <= nbytes


def receive(rendezvous: dict[str, Any], rank: int, dies: str, told: Connection) -> None:
    """A worker of a server."""
    channel = Channel(Rendezvous(**rendezvous), rank, CPU)
    received: list[tuple[str, float]] = []
    while True:
        header, data = channel.receive()
        if header.get("end"):
            break
        received += [(name, tensor.double().sum().item()) for name, tensor in unpack(header, data)]
        if dies == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if dies == "refuses":
            channel.close()
            time.sleep(60)
    told.send(received)


def start(workers: int, dies: str = "") -> tuple[WeightConnection, list[Any], list[Connection]]:
    store = listen("127.0.0.1", 0)
    STORES.append(store)
    rendezvous = {"host": "127.0.0.1", "port": store.port, "size": workers + 1, "session": "s", "timeout": 60.0}
    context = multiprocessing.get_context("spawn")
    processes, told = [], []
    for rank in range(1, workers + 1):
        ours, its = context.Pipe()
        process = context.Process(target=receive, args=(rendezvous, rank, dies, its), daemon=True)
        process.start()
        PROCESSES.append(process)
        processes.append(process)
        told.append(ours)
    return WeightSender(CPU, 100).join(rendezvous), processes, told


STORES: list[Any] = []
PROCESSES: list[Any] = []


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    for process in PROCESSES:
        process.kill()
    PROCESSES.clear()
    STORES.clear()


def test_every_worker_of_every_server_receives_all_and_a_dead_server_holds_up_nobody() -> None:
    well, _, told = start(workers=2)
    killed, _, _ = start(workers=1, dies="killed")
    refusing, _, _ = start(workers=1, dies="refuses")
    exported = []

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in WEIGHTS * 20:
            exported.append(name)
            yield name, tensor

    failures = WeightSender(CPU, 100).send(export(), [well, killed, refusing])
    assert failures[0] is None
    assert [type(failure) for failure in failures[1:]] == [RuntimeError, RuntimeError], failures
    assert len(exported) == 100  # all of it, or the other ranks would wait
    expected = [(name, tensor.double().sum().item()) for name, tensor in WEIGHTS * 20]
    for connection in told:
        assert connection.poll(60) and connection.recv() == expected


def test_closing_a_line_frees_its_sender() -> None:
    """As when the server has answered that it could not load what it got, and receives no more."""
    store = listen("127.0.0.1", 0)
    STORES.append(store)
    rendezvous = {"host": "127.0.0.1", "port": store.port, "size": 2, "session": "s", "timeout": 60.0}
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=join_only, args=(rendezvous,), daemon=True)
    process.start()
    PROCESSES.append(process)
    line = WeightSender(CPU, 100).join(rendezvous)
    line.begin()
    large = torch.zeros(200_000_000)
    began = time.monotonic()
    for bucket in buckets([("large", large)], 1):
        line.put(bucket)
    time.sleep(1)
    line.close()
    assert line.finish({"end": True}) is not None
    assert time.monotonic() - began < 30


def join_only(rendezvous: dict[str, Any]) -> None:
    channel = Channel(Rendezvous(**rendezvous), 1, CPU)
    time.sleep(120)
    channel.close()


def test_the_rendezvous_listens_on_its_address_alone() -> None:
    store = listen("127.0.0.1", 0)
    STORES.append(store)
    addresses = {line.split()[3] for line in os.popen(f"ss -ltn 'sport = :{store.port}'").read().splitlines()[1:]}
    assert addresses == {f"127.0.0.1:{store.port}"}
