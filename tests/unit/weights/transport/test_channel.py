"""Weights sent from one process to others, over gloo, also when a receiver dies or closes its channel."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swift_megatron_grpo.generation.remote.weight_sender import Message, WeightConnection, WeightSender
from swift_megatron_grpo.weights.transport.buckets import buckets, unpack
from swift_megatron_grpo.weights.transport.channel import Channel
from swift_megatron_grpo.weights.transport.rendezvous import Hub, Rendezvous, new_secret
from tests.forking.client import ForkedProcess, fork_server
from tests.paths import REPOSITORY

CPU = torch.device("cpu")
WEIGHTS = [
    ("a", torch.arange(7, dtype=torch.bfloat16)),
    ("b", torch.randn(5, 3)),
    ("scalar", torch.tensor(2.5)),
    ("bytes", torch.arange(3, dtype=torch.uint8)),
    ("c", torch.randn(40, 40).t()),
    ("n" * 40_000, torch.ones(2)),  # more than a frame has room for
]


@given(st.integers(1, 10_000))
def test_tensors_are_bit_identical_after_packing_into_buckets(nbytes: int) -> None:
    packed = list(buckets(iter(WEIGHTS), nbytes))
    unpacked = [pair for bucket in packed for pair in unpack(bucket.header, bucket.data)]
    assert [name for name, _ in unpacked] == [name for name, _ in WEIGHTS]
    for (_, sent), (_, received) in zip(WEIGHTS, unpacked, strict=True):
        assert received.dtype == sent.dtype and torch.equal(received, sent)
    sizes = {name: tensor.nbytes for name, tensor in WEIGHTS}
    for bucket in packed:
        names = [entry.name for entry in bucket.header["entries"]]
        assert len(names) == 1 or sum(map(sizes.__getitem__, names)) <= nbytes


def receive(rendezvous: dict[str, Any], rank: int, failure: str, results: str) -> None:
    """Receive all weights as a worker of a server does, and write their sums to a file."""
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
    Path(results).write_text(json.dumps(received))


def start(workers: int, folder: Path, failure: str = "") -> tuple[WeightConnection, list[ForkedProcess], list[Path]]:
    rendezvous = open_rendezvous(workers + 1)
    results = [folder / f"received{rank}.json" for rank in range(1, workers + 1)]
    processes = [
        start_process("receive", rendezvous, rank, failure, str(path)) for rank, path in enumerate(results, start=1)
    ]
    return WeightSender(CPU, 100).join(Rendezvous(**rendezvous)), processes, results


def start_process(function: str, *arguments: Any) -> ForkedProcess:
    """Call a function of this file in a fork that has imported torch."""
    code = f"import json, sys\nfrom {__name__} import {function}\n{function}(*json.loads(sys.argv[1]))"
    with open(os.devnull, "w") as output:
        process = fork_server("upstream").start("code", [code, json.dumps(arguments)], 0, REPOSITORY, output, {})
    PROCESSES.append(process)
    return process


def open_rendezvous(size: int) -> dict[str, Any]:
    hub = Hub("127.0.0.1", 0, size, secret := new_secret())
    HUBS.append(hub)
    return {"host": "127.0.0.1", "port": hub.port, "size": size, "secret": secret, "timeout": 60.0}


HUBS: list[Hub] = []
PROCESSES: list[ForkedProcess] = []


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    for process in PROCESSES:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    PROCESSES.clear()
    for hub in HUBS:
        hub.close()
    HUBS.clear()


def test_every_worker_of_every_server_receives_all_weights(
    tmp_path: Path,
) -> None:
    """A dead server blocks no other."""
    healthy, processes, results = start(2, tmp_path)
    killed, _, _ = start(1, tmp_path, failure="killed")
    closed, _, _ = start(1, tmp_path, failure="closed")
    exported = []

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in WEIGHTS * 20:
            exported.append(name)
            yield name, tensor

    failures = WeightSender(CPU, 100).send(export(), [healthy, killed, closed])
    assert failures[0] is None
    assert [type(failure) for failure in failures[1:]] == [RuntimeError, RuntimeError], failures
    assert len(exported) == 20 * len(WEIGHTS)  # exhausted, or the other ranks of the trainer would hang
    expected = [[name, tensor.double().sum().item()] for name, tensor in WEIGHTS * 20]
    for process, path in zip(processes, results, strict=True):
        assert process.wait(60) == 0 and json.loads(path.read_text()) == expected


def test_closing_a_connection_unblocks_its_sender() -> None:
    """This happens when the server reports that it could not load the weights, and receives no more."""
    rendezvous = open_rendezvous(2)
    start_process("join_only", rendezvous)
    connection = WeightSender(CPU, 100).join(Rendezvous(**rendezvous))
    connection.begin()
    large = torch.zeros(200_000_000)
    began = time.monotonic()
    for bucket in buckets([("large", large)], 1):
        connection.put(Message(bucket.header, bucket.data))
    time.sleep(1)
    connection.close()
    assert isinstance(connection.finish(Message({"end": True})), ConnectionError)
    assert time.monotonic() - began < 30


def join_only(rendezvous: dict[str, Any]) -> None:
    channel = Channel(Rendezvous(**rendezvous), 1, CPU)
    time.sleep(120)
    channel.close()


def test_the_rendezvous_listens_on_its_address_only() -> None:
    port = open_rendezvous(2)["port"]
    addresses = {line.split()[3] for line in os.popen(f"ss -ltn 'sport = :{port}'").read().splitlines()[1:]}
    assert addresses == {f"127.0.0.1:{port}"}


def test_gloo_takes_the_interface_that_its_variable_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's default device would take the address of the machine's name, which is of loopback on many."""
    interfaces = {name: [one.address for one in of_one] for name, of_one in psutil.net_if_addrs().items()}
    for name in ("lo", *[name for name, of_one in interfaces.items() if any("." in one for one in of_one)][:2]):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        before = listening()
        rendezvous = open_rendezvous(2)
        start_process("join_only", rendezvous)
        connection = WeightSender(CPU, 100).join(Rendezvous(**rendezvous))
        new = {address for address, port in listening() - before if port != rendezvous["port"]}
        assert new and new <= set(interfaces[name])
        connection.close()


def listening() -> set[tuple[str, int]]:
    return {
        (one.laddr.ip, one.laddr.port) for one in psutil.Process().net_connections("inet") if one.status == "LISTEN"
    }
