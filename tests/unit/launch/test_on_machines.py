"""Machines of a job find their place and their servers, or refuse with what to set."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

import pytest
from torch import distributed as dist

from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from swift_megatron_grpo.launch.on_machines import Site, _Others, run_on_machines, servers_of_machines, site_of
from swift_megatron_grpo.launch.on_this_machine import run_on_this_machine
from swift_megatron_grpo.launch.roles import Refused, Roles
from swift_megatron_grpo.launch.supervision import End
from tests.forking.client import free_port

JOB = {"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "gpu0"}


def roles(ranks: int, machines: int, servers: int = 0, size: int = 1, max_failures: int = 0) -> Roles:
    return Roles(ranks, machines, servers, size, (), (), use_ray=False, name="", max_failures=max_failures)


def test_a_machine_finds_its_place() -> None:
    assert site_of({}) is None and site_of({"NNODES": "1", "NODE_RANK": "0"}) is None
    assert site_of(JOB) == Site(2, 3, "gpu0", 29500)
    slurm = {"SLURM_NNODES": "3", "SLURM_NODEID": "1", "MASTER_ADDR": "gpu0", "MASTER_PORT": "4000"}
    assert site_of(slurm) == Site(1, 3, "gpu0", 4000)
    assert site_of({"NNODES": "2", "JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "a"}) == Site(1, 2, "a", 29500)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (JOB | {"NODE_RANK": "3"}, "NNODES=3 and NODE_RANK=3: number the 3 machines from 0"),
        (JOB | {"NNODES": "two"}, "NNODES=two"),
        (JOB | {"NODE_RANK": "-1"}, "NODE_RANK=-1"),
        (JOB | {"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        (JOB | {"MASTER_PORT": "65535"}, "MASTER_PORT=65535 is not a port with a next one; use MASTER_PORT=29500"),
        (JOB | {"MASTER_PORT": "x"}, "MASTER_PORT=x"),
    ],
)
def test_a_wrong_place_is_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(Refused, match=message):
        site_of(variables)


def test_servers_fill_machines_without_ranks_first() -> None:
    assert servers_of_machines(roles(16, 2, 4, 2), 3, 8) == [range(0), range(0), range(4)]
    assert servers_of_machines(roles(8, 2, 5, 2), 3, 8) == [range(4, 5), range(0), range(4)]
    assert servers_of_machines(roles(2, 1, 3), 3, None) == [range(0), range(2), range(2, 3)]
    assert servers_of_machines(roles(16, 2), 2, 8) == [range(0), range(0)]
    assert servers_of_machines(roles(2, 2, 3), 2, None) == [range(3), range(0)]


@pytest.mark.parametrize(
    ("wanted", "machines", "message"),
    [
        (roles(16, 2), 1, "nnodes 2 is more than the 1 machines of the job"),
        (roles(16, 1, 1), 2, "machines have 8 GPUs, and 16 ranks each; use more nnodes"),
        (roles(8, 1, 3, 4), 2, "1 of 3 servers find no GPUs"),
        (roles(8, 1, 1, 16), 2, "1 of 1 servers find no GPUs"),
        (roles(8, 1, 1, 8), 3, "machine 2 has neither ranks nor servers; set nnodes: 3, or start fewer machines"),
    ],
)
def test_a_job_that_does_not_fit_is_refused(wanted: Roles, machines: int, message: str) -> None:
    with pytest.raises(Refused, match=message):
        servers_of_machines(wanted, machines, 8)


def test_what_needs_other_settings_is_refused_before_a_store_opens() -> None:
    site = Site(0, 2, "127.0.0.1", 1)
    with pytest.raises(Refused, match="servers on several machines need a key: set SWIFT_ROLLOUT_API_KEY_FILE"):
        run_on_machines(roles(1, 1, 1), site, {})
    with pytest.raises(Refused, match="max_failures needs Ray on several machines"):
        run_on_machines(roles(1, 1, 1, max_failures=1), site, {API_KEY_VARIABLE: "key"})
    with pytest.raises(Refused, match="nnodes 2: this is one machine; start the same command on 2"):
        run_on_this_machine(roles(2, 2), {})


def wait_for_end(others: _Others) -> End:
    limit = monotonic() + 20
    while (end := others.end()) is None:
        assert monotonic() < limit
        sleep(0.05)
    return end


def test_machines_learn_how_others_ended() -> None:
    port = free_port()
    sites = [Site(number, 3, "127.0.0.1", port) for number in range(3)]
    with ThreadPoolExecutor(3) as threads:
        first, second, servers = threads.map(lambda site: _Others(site, range(2), 1, "a key"), sites)
        assert servers.host == "127.0.0.1"
        left = [threads.submit(first.leave, End(0)), threads.submit(second.leave, End(0))]
        assert wait_for_end(servers) == End(0)
        assert (first.end(), second.end()) == (None, None)  # their own ranks end them
        servers.leave(End(0))
        for each in left:
            each.result(20)


def test_what_a_stranger_writes_is_not_taken() -> None:
    """It reaches the store, as everyone does, and has another key or none."""
    site = Site(0, 3, "127.0.0.1", free_port())
    own = _Others(site, range(1), 0, "a key")
    own.say("server/0", "http://a:1")
    assert own.heard("server/0") == "http://a:1"
    stranger = dist.TCPStore("127.0.0.1", site.port + 1, is_master=False)
    signed = stranger.get("server/0")
    for forged in (b"http://evil:1", signed.replace(b"a:1", b"b:1"), b"", b"\xff " * 9, signed[1:]):
        stranger.set("server/0", forged)
        assert own.heard("server/0") is None
    stranger.set("server/1", signed)  # of another server
    assert own.heard("server/1") is None
    stranger.set("end/1", "[1, 2]")
    _Others(replace(site, machine=2), range(1), 1, "another key").say("end/2", '[1, "evil"]')
    sleep(1.5)
    assert dict(own._ends()) == {} and own.end() is None
    own._leaves.set()


def test_what_an_earlier_job_has_signed_is_not_taken() -> None:
    """A stranger has recorded the store of a job with the same key, and writes all of it to that of a later one."""
    names = ["nonce/0", "nonce/1", "server/0", "end/2"]
    with ThreadPoolExecutor(2) as threads:
        port = free_port()
        sites = [Site(number, 3, "127.0.0.1", port) for number in range(2)]
        earlier, other = threads.map(lambda site: _Others(site, range(2), 1, "a key"), sites)
        earlier.say("server/0", "http://old:1")
        earlier.say("end/2", '[1, "old"]')
        assert other.heard("server/0") == "http://old:1"
        store = dist.TCPStore("127.0.0.1", port + 1, is_master=False)
        recorded = {name: store.get(name) for name in names}

        port = free_port()
        sites = [Site(number, 3, "127.0.0.1", port) for number in range(2)]
        first = threads.submit(_Others, sites[0], range(2), 1, "a key")
        stranger = dist.TCPStore("127.0.0.1", port + 1, is_master=False)
        stranger.wait(["nonce/0"])  # the first machine has begun, and the second has not
        for name in names:
            stranger.set(name, recorded[name])
        second = _Others(sites[1], range(2), 1, "a key")
        later = [first.result(20), second]
    sleep(1.5)
    for each in later:
        assert each.heard("server/0") is None and each.urls is None and dict(each._ends()) == {}
        assert "rollout server 0 in the store of machine 0 is not signed" in wait_for_end(each).line
    for each in (earlier, other, *later):
        each._leaves.set()


def test_a_failure_of_one_machine_ends_the_others() -> None:
    port = free_port()
    sites = [Site(number, 2, "127.0.0.1", port) for number in range(2)]
    with ThreadPoolExecutor(2) as threads:
        first, servers = threads.map(lambda site: _Others(site, range(1), 1, "a key"), sites)
        servers.leave(End(1, "rollout server 0 ended"))
        assert wait_for_end(first) == End(1, "machine 1: rollout server 0 ended")


def test_ranks_begin_once_all_servers_have_an_address() -> None:
    port = free_port()
    sites = [Site(number, 2, "127.0.0.1", port) for number in range(2)]
    with ThreadPoolExecutor(2) as threads:
        first, servers = threads.map(lambda site: _Others(site, range(1), 2, "a key"), sites)
        servers.say("server/1", "http://b:1")
        sleep(1.5)
        assert first.urls is None and first.end() is None
        servers.say("server/0", "http://a:1")
        limit = monotonic() + 20
        while first.urls is None and monotonic() < limit:
            sleep(0.05)
        assert first.urls == ("http://a:1", "http://b:1")
        for each in (first, servers):
            each._leaves.set()


@pytest.mark.parametrize("waits_for", ["machine 0", "a machine with ranks", "a server"])
def test_a_machine_that_waits_for_others_stops_at_a_signal(tmp_path: Path, waits_for: str) -> None:
    """Slurm and Kubernetes kill what has not ended half a minute after it."""
    ranks, machines, machine = {"machine 0": (1, 2, 1), "a machine with ranks": (2, 3, 0), "a server": (1, 2, 0)}[
        waits_for
    ]
    config = tmp_path / "run.yaml"
    config.write_text(f"nnodes: {ranks}\ntrain: {{gpus: {ranks}}}\nrollout: {{gpus: 1}}\n")
    place = {"NNODES": str(machines), "NODE_RANK": str(machine), "MASTER_ADDR": "127.0.0.1"}
    variables = {**os.environ, **place, "MASTER_PORT": str(free_port()), API_KEY_VARIABLE: "key"}
    words = [sys.executable, "-m", "swift_megatron_grpo.launch", str(config)]
    with subprocess.Popen(words, env=variables, stderr=subprocess.PIPE, text=True) as process:
        while not catches_sigterm(process.pid):
            assert process.poll() is None
            sleep(0.2)
        sleep(2)  # until it waits
        process.send_signal(signal.SIGTERM)
        error = process.communicate(timeout=30)[1]
    assert process.returncode == 143, error


def catches_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)
