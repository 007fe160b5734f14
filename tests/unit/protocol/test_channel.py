"""Weights sent from one process to others, over gloo, also when a receiver dies or closes its channel."""

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
from swift_megatron_grpo.protocol.channel import Channel
from swift_megatron_grpo.protocol.rendezvous import Hub, Rendezvous, new_secret

CPU = torch.device("cpu")
WEIGHTS = [
    ("a", torch.arange(7, dtype=torch.bfloat16)),
    ("b", torch.randn(5, 3)),
    ("scalar", torch.tensor(2.5)),
    ("bytes", torch.arange(3, dtype=torch.uint8)),
    ("c", torch.randn(40, 40).t()),
]


@given(st.integers(1, 10_000))
def test_tensors_are_bit_identical_after_packing_into_buckets(nbytes: int) -> None:
    packed = list(buckets(iter(WEIGHTS), nbytes))
    unpacked = [pair for bucket in packed for pair in unpack(bucket.header, bucket.data)]
    assert [name for name, _ in unpacked] == [name for name, _ in WEIGHTS]
    for (_, sent), (_, received) in zip(WEIGHTS, unpacked, strict=True):
        assert received.dtype == sent.dtype and torch.equal(received, sent)
    for bucket in packed:
        assert len(bucket.entries) == 1 or sum(entry.nbytes for entry in bucket.entries) <= nbytes


def receive(rendezvous: dict[str, Any], rank: int, failure: str, results: Connection) -> None:
    """Receive all weights as a worker of a server does, and send their sums to the test."""
    channel = Channel(Rendezvous(**rendezvous), rank, CPU)
    received: list[tuple[str, float]] = []
    while True:
        header, data = channel.receive()
        if header.get("end"):
            break
        received += [(name, tensor.double().sum().item()) for name, tensor in unpack(header, data)]
        if failure == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if failure == "closed":
            channel.close()
            time.sleep(60)
    results.send(received)


def start(workers: int, failure: str = "") -> tuple[WeightConnection, list[Any], list[Connection]]:
    rendezvous = open_rendezvous(workers + 1)
    context = multiprocessing.get_context("spawn")
    processes, results = [], []
    for rank in range(1, workers + 1):
        parent_end, child_end = context.Pipe()
        process = context.Process(target=receive, args=(rendezvous, rank, failure, child_end), daemon=True)
        process.start()
        PROCESSES.append(process)
        processes.append(process)
        results.append(parent_end)
    return WeightSender(CPU, 100).join(rendezvous), processes, results


def open_rendezvous(size: int) -> dict[str, Any]:
    hub = Hub("127.0.0.1", 0, size, secret := new_secret())
    HUBS.append(hub)
    return {"host": "127.0.0.1", "port": hub.port, "size": size, "secret": secret, "timeout": 60.0}


HUBS: list[Hub] = []
PROCESSES: list[Any] = []


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    for process in PROCESSES:
        process.kill()
    PROCESSES.clear()
    for hub in HUBS:
        hub.close()
    HUBS.clear()


def test_every_worker_of_every_server_receives_all_weights_and_a_dead_server_blocks_no_other() -> None:
    healthy, _, results = start(workers=2)
    killed, _, _ = start(workers=1, failure="killed")
    closed, _, _ = start(workers=1, failure="closed")
    exported = []

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in WEIGHTS * 20:
            exported.append(name)
            yield name, tensor

    failures = WeightSender(CPU, 100).send(export(), [healthy, killed, closed])
    assert failures[0] is None
    assert [type(failure) for failure in failures[1:]] == [RuntimeError, RuntimeError], failures
    assert len(exported) == 100  # the export must be exhausted, or the other ranks of the trainer would hang
    expected = [(name, tensor.double().sum().item()) for name, tensor in WEIGHTS * 20]
    for connection in results:
        assert connection.poll(60) and connection.recv() == expected


def test_closing_a_connection_unblocks_its_sender() -> None:
    """This happens when the server reports that it could not load the weights, and receives no more."""
    rendezvous = open_rendezvous(2)
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=join_only, args=(rendezvous,), daemon=True)
    process.start()
    PROCESSES.append(process)
    connection = WeightSender(CPU, 100).join(rendezvous)
    connection.begin()
    large = torch.zeros(200_000_000)
    began = time.monotonic()
    for bucket in buckets([("large", large)], 1):
        connection.put(bucket)
    time.sleep(1)
    connection.close()
    assert connection.finish({"end": True}) is not None
    assert time.monotonic() - began < 30


def join_only(rendezvous: dict[str, Any]) -> None:
    channel = Channel(Rendezvous(**rendezvous), 1, CPU)
    time.sleep(120)
    channel.close()


def test_the_rendezvous_listens_on_its_address_only() -> None:
    port = open_rendezvous(2)["port"]
    addresses = {line.split()[3] for line in os.popen(f"ss -ltn 'sport = :{port}'").read().splitlines()[1:]}
    assert addresses == {f"127.0.0.1:{port}"}
