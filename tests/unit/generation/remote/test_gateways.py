"""Weights from two ranks to real web servers over gloo, a gateway and rank 0, also when servers or the gateway fail."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from socket import AF_INET
from typing import Any

import psutil
import pytest

from swift_megatron_grpo.generation.remote.gateways import Place, _place, assign
from tests.forking.client import ForkedProcess, fork_server
from tests.paths import REPOSITORY
from tests.unit.generation.remote.gateway_processes import TENSORS

PROGRAMS = "tests.unit.generation.remote.gateway_processes"
LOOPBACK, HERE, ELSEWHERE = "loopback", "this machine", "elsewhere"


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ({0: [ELSEWHERE] * 4, 8: [ELSEWHERE] * 4}, [0, 8, 0, 8]),
        ({0: [ELSEWHERE] * 2, 8: [ELSEWHERE] * 2, 16: [ELSEWHERE] * 2}, [0, 8]),
        ({0: [HERE, ELSEWHERE], 8: [ELSEWHERE, HERE]}, [0, 8]),
        ({0: [ELSEWHERE, HERE], 8: [HERE, ELSEWHERE]}, [8, 0]),
        ({0: [HERE, HERE, ELSEWHERE, ELSEWHERE], 8: [ELSEWHERE] * 4}, [0, 0, 8, 8]),  # no network to its own
        ({0: [ELSEWHERE, ELSEWHERE, HERE], 8: [ELSEWHERE] * 3}, [8, 0, 0]),  # its own counts first
        ({0: [LOOPBACK, LOOPBACK], 8: [LOOPBACK, LOOPBACK]}, [0, 0]),  # loopback of 8 is another machine's
        ({0: [ELSEWHERE, ELSEWHERE], 8: [ELSEWHERE, LOOPBACK]}, [0, 8]),  # its name is of loopback on its own machine
        ({0: [HERE, HERE], 1: [HERE, HERE]}, [0, 1]),  # two torchruns on a machine
    ],
)
def test_servers_belong_to_their_machine_then_to_who_has_fewest(
    places: dict[int, list[Place]], expected: list[int]
) -> None:
    assert assign(places) == expected


def test_a_machine_finds_its_own_servers_by_their_addresses() -> None:
    assert [_place(f"http://{host}:8000") for host in ("localhost", "127.0.0.1", "[::1]", "0.0.0.0")] == [LOOPBACK] * 4
    own = {one.address for of_one in psutil.net_if_addrs().values() for one in of_one if one.family == AF_INET}
    assert [_place(f"http://{host}:8000") for host in own - {"127.0.0.1"}] == [HERE] * (len(own) - 1)
    assert _place("http://198.51.100.77:8000") == ELSEWHERE  # reserved for documentation
    assert _place("http://no-such-host.invalid:8000") == ELSEWHERE


# ---- processes


class Processes:
    """Servers and ranks of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._started = folder, list[ForkedProcess]()

    def call(self, function: str, *arguments: Any, ranks: int = 0) -> ForkedProcess:
        code = f"import json, sys\nfrom {PROGRAMS} import {function}\n{function}(*json.loads(sys.argv[1]))"
        with (self.folder / f"{function}.log").open("a") as log:
            process = fork_server("upstream").start("code", [code, json.dumps(arguments)], ranks, REPOSITORY, log, {})
        self._started.append(process)
        return process

    def servers(self, faults: Sequence[str]) -> list[ForkedProcess]:
        return [self.call("serve", fault, str(self.folder / f"{place}.json")) for place, fault in enumerate(faults)]

    def train(self, servers: int, transfers: int, fault: str = "", seconds: float = 60) -> ForkedProcess:
        urls = [wait_for((self.folder / f"{place}.url").read_text) for place in range(servers)]
        return self.call("train", urls, transfers, fault, str(self.folder), seconds, ranks=2)

    def states(self) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = json.loads((self.folder / "states.json").read_text())
        return states

    def received(self, server: int) -> dict[str, Any]:
        received: dict[str, Any] = json.loads((self.folder / f"{server}.json").read_text())
        return received

    def log(self) -> str:
        return (self.folder / "train.log").read_text()

    def kill(self) -> None:
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.kill()


def wait_for(read: Callable[[], str]) -> str:
    end = time.monotonic() + 60
    while True:
        try:
            return read()
        except FileNotFoundError:
            assert time.monotonic() < end
            time.sleep(0.05)


def whole(version: int) -> dict[str, float]:
    return {f"tensor {place}": float(version * 100 + place) for place in range(TENSORS)}


def test_a_gateway_sends_every_transfer_over_one_connection(processes: Processes) -> None:
    processes.servers(["", "", ""])
    assert processes.train(3, transfers=3).wait(120) == 0, processes.log()
    assert [[one["gateway"] for one in state["servers"]] for state in processes.states()] == [[0, 1, 0]] * 3
    for server in range(3):
        message = {"end": True, "adapter": {"r": 8}}
        assert processes.received(server) == {"joins": 1, "received": whole(2), "message": message}


def test_strangers_find_no_more_of_a_gateway_than_of_rank_0(processes: Processes) -> None:
    """A group of gloo listens on the address at which the server reaches the rank. The store has no secret."""
    processes.servers(["", "refuses"])
    assert processes.train(2, transfers=2).wait(120) == 0, processes.log()
    of_rank_0, of_gateway = (json.loads((processes.folder / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert 0 < len(of_gateway) <= 2 * len(of_rank_0)  # it has joined its server twice
    assert {host for host, _ in of_gateway} == {"127.0.0.1"}
    secrets = [(processes.folder / f"{server}.secret").read_text() for server in (0, 1)]
    held = (processes.folder / "rank0.store").read_text()
    assert "b'closed'" in held and not any(secret in held for secret in secrets)


@pytest.mark.parametrize(
    ("fault", "lost", "problem"),
    [
        ("killed", "it failed while weights were sent: ", None),
        ("killed before it is joined", "Cannot connect to host", None),
        ("hangs before it is joined", "connecting for weights failed: no response within 3 s", None),
        ("hangs", "no response within ", None),
        ("refuses", None, "it cannot load these weights"),
    ],
)
def test_a_server_that_fails_in_a_bucket_of_a_gateway_fails_alone(
    processes: Processes, fault: str, lost: str | None, problem: str | None
) -> None:
    """The others get these weights and the next. One that lives and refused gets the next over a new connection."""
    processes.servers(["", fault])
    assert processes.train(2, transfers=2, seconds=3 if "hangs" in fault else 60).wait(120) == 0, processes.log()
    first, second = processes.states()
    healthy, failed = first["servers"]
    assert healthy["version"] == 0 and healthy["lost"] is None and failed["version"] == -1
    assert first["seconds"] < 20  # its connection would wait for 60 s
    assert failed["lost"] is None if lost is None else lost in failed["lost"]
    assert first["problems"] == [] if problem is None else problem in first["problems"][0]
    assert processes.received(0)["received"] == whole(1)
    assert second["problems"] == [] and second["servers"][0]["version"] == 1
    if fault == "refuses":
        assert second["servers"][1] == {"version": 1, "lost": None, "gateway": 1}
        assert processes.received(1) == {**processes.received(0), "joins": 2}


@pytest.mark.parametrize("fault", ["out of reach", "wrong secret"])
def test_a_server_that_a_gateway_does_not_reach_gets_weights_of_rank_0(processes: Processes, fault: str) -> None:
    processes.servers(["", fault])
    assert processes.train(2, transfers=2).wait(120) == 0, processes.log()
    for version, state in enumerate(processes.states()):
        assert [one["version"] for one in state["servers"]] == [version] * 2 and state["problems"] == []
        assert [one["gateway"] for one in state["servers"]] == [0, 0]
    assert processes.received(1) == {**processes.received(0), "joins": 2}
    assert "rank 0 connects to it for weights (rank 1: " in processes.log()


def test_a_gateway_that_is_killed_ends_the_run(processes: Processes) -> None:
    servers = processes.servers(["", ""])
    run = processes.train(2, transfers=2, fault="killed")
    assert run.wait(60) != 0
    assert not (processes.folder / "states.json").exists()
    assert all(server.poll() is None for server in servers)
