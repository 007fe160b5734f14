"""Members are actors of a real Ray on two machines; their commands are small programs."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread, Timer

import psutil
import pytest

pytest.importorskip("ray")

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import remove_placement_group

from swift_megatron_grpo.launch import on_ray
from swift_megatron_grpo.launch.capacity import refuse_too_few
from swift_megatron_grpo.launch.on_ray import actors, placed
from swift_megatron_grpo.launch.roles import Refused, Roles
from swift_megatron_grpo.launch.supervision import End, StopRequest, Supervision, run
from tests.support.ray_cluster import ray_cluster
from tests.unit.output.checkpoints.test_newest import saved

ROLES = Roles(
    ranks=4, machines=2, servers=1, gpus_of_server=1, trainer_flags=(), server_flags=(), use_ray=True, name="test",
    max_failures=0,
)  # fmt: skip
SERVER = """
import http.server, os, sys
open(sys.argv[1], "a").write(f"{os.getpid()} ")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
SLEEP = "import time; time.sleep(600)\n"
WRITES_PIDS = """
import os
open("parent", "w").write(str(os.getppid()))
open("own", "w").write(str(os.getpid()))
"""
FAILING = """
import os
open(os.environ["SWIFT_MEGATRON_GRPO_FAILURE"], "w").write("rank 3 has ended: killed by signal 9")
raise SystemExit(1)
"""
STOPPING = """
import os, signal, sys, time
def stop(*_):
    open("stopped", "a").write("x")
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
open("own", "a").write(f"{os.getpid()} ")
time.sleep(600)
"""
UNTIL_DONE = """
import os, time
while not os.path.exists("done"):
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster(3, 2) as running:
        yield running


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield StopRequest()
    for number, handler in before.items():
        signal.signal(number, handler)


class Started:
    """Two machines of ranks, and a server, which run programs of a test."""

    def __init__(self, folder: Path, stop: StopRequest, programs: tuple[str, str], server: str = SERVER) -> None:
        self.folder = folder
        self.group = placed(ROLES, "CPU", stop)
        self.ranks, [self.server] = actors(ROLES, self.group, "CPU", f"{folder.name}-{time.time_ns()}")
        for rank, program in zip(self.ranks, programs, strict=True):
            rank.place()
            rank.start(("-c", program), {"FOLDER": str(folder)}, str(folder), None)
        _, port = self.server.place()
        self.server.start(("-c", server, str(folder / "pids"), str(port)), {}, str(folder), f"http://127.0.0.1:{port}/")

    def supervision(self) -> Supervision:
        flags = ["--output_dir", str(self.folder / "output"), "--stop_grace", "5"]
        return Supervision(self.ranks, [self.server], flags)

    def until_end(self, stop: StopRequest) -> End:
        try:
            return self.supervision().until_end(stop)
        finally:
            remove_placement_group(self.group)

    def pids_of_server(self) -> list[int]:
        file = self.folder / "pids"
        return [int(pid) for pid in file.read_text().split()] if file.exists() else []


def pid_in(file: Path, number: int = 1) -> int:
    """Return the last pid when so many processes have written theirs."""
    end = time.monotonic() + 30
    while not (file.exists() and len(file.read_text().split()) >= number):
        assert time.monotonic() < end, f"{file} is not written"
        time.sleep(0.05)
    return int(file.read_text().split()[-1])


def test_ranks_that_end_well_end_the_servers(cluster: Cluster, stop: StopRequest, tmp_path: Path) -> None:
    started = Started(tmp_path, stop, ("", "import time; time.sleep(1)"))
    assert started.until_end(stop) == End(0)
    assert not any(psutil.pid_exists(pid) for pid in started.pids_of_server())


def test_a_rank_that_fails_ends_all_with_a_line_that_names_it(
    cluster: Cluster, stop: StopRequest, tmp_path: Path
) -> None:
    newest = saved(tmp_path / "output", 20, at=50.0)
    end = Started(tmp_path, stop, (SLEEP, FAILING)).until_end(stop)
    assert (end.code, end.may_continue) == (1, True)
    assert re.fullmatch(
        r"machine 1 \([\d.]+\): rank 3 has ended: killed by signal 9\. All ranks and servers are ended; the newest "
        rf"whole checkpoint is {newest}\. To continue, .* use the same command with --resume auto",
        end.line,
    )


def test_a_lost_machine_ends_the_run(cluster: Cluster, stop: StopRequest, tmp_path: Path) -> None:
    machine = cluster.add_node(num_cpus=7, object_store_memory=100 * 2**20)
    large = replace(ROLES, ranks=7, machines=1, servers=0)
    group = placed(large, "CPU", stop)
    [rank], _ = actors(large, group, "CPU", "lost")
    rank.place()
    rank.start(("-c", WRITES_PIDS + SLEEP), {}, str(tmp_path), None)
    own = pid_in(tmp_path / "own")
    Timer(1, cluster.remove_node, [machine]).start()
    end = Supervision([rank], [], []).until_end(stop)
    assert end.may_continue and "machine 0 (" in end.line and "its actor is gone: " in end.line
    wait_until_gone(own)
    remove_placement_group(group)


def test_a_killed_actor_ends_what_it_has_started(cluster: Cluster, stop: StopRequest, tmp_path: Path) -> None:
    started = Started(tmp_path, stop, (WRITES_PIDS + SLEEP, SLEEP))
    own, actor = pid_in(tmp_path / "own"), pid_in(tmp_path / "parent")
    os.kill(actor, signal.SIGKILL)
    end = started.until_end(stop)
    assert end.line.startswith("machine 0 (") and "its actor is gone: The actor died" in end.line
    wait_until_gone(own)


def wait_until_gone(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(10)


def test_a_signal_reaches_the_ranks_which_stop(cluster: Cluster, stop: StopRequest, tmp_path: Path) -> None:
    started = Started(tmp_path, stop, (STOPPING, STOPPING))
    pid_in(tmp_path / "own", 2)
    Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    assert started.until_end(stop) == End(130)
    assert (tmp_path / "stopped").read_text() == "xx"
    assert not any(psutil.pid_exists(pid) for pid in started.pids_of_server())


def test_a_server_that_ends_is_started_again_at_its_address(
    cluster: Cluster, stop: StopRequest, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    started = Started(tmp_path, stop, (UNTIL_DONE, UNTIL_DONE))
    first = pid_in(tmp_path / "pids")

    def disturb() -> None:
        time.sleep(2)  # until its actor has asked it for its health
        os.kill(first, signal.SIGKILL)
        end = time.monotonic() + 30
        while len(started.pids_of_server()) < 2 and time.monotonic() < end:
            time.sleep(0.1)
        (tmp_path / "done").touch()

    Thread(target=disturb).start()
    assert started.until_end(stop) == End(0)
    assert len(started.pids_of_server()) == 2
    assert "has ended, and is started again at its address" in capfd.readouterr().err


def test_a_server_that_cannot_start_ends_the_run(cluster: Cluster, stop: StopRequest, tmp_path: Path) -> None:
    end = Started(tmp_path, stop, (SLEEP, SLEEP), server="raise SystemExit(3)").until_end(stop)
    assert (end.code, end.may_continue) == (1, False)
    assert re.fullmatch(r"rollout server 0 \([\d.]+\) ended with exit code 3 before it was ready, .*", end.line)


def test_a_run_that_fails_is_started_again(
    cluster: Cluster, stop: StopRequest, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The ranks fail in the first start alone."""
    starts = []

    def begin(resumes: bool) -> Supervision:
        for before in starts:
            remove_placement_group(before.group)
        starts.append(Started(tmp_path, stop, ("", "") if resumes else (FAILING, FAILING)))
        return starts[-1].supervision()

    assert run(begin, 1, stop) == End(0)
    assert "This is failure 1; the run is started again (max_failures 1)" in capfd.readouterr().err
    remove_placement_group(starts[-1].group)


def test_a_folder_that_a_machine_lacks_is_named(cluster: Cluster, stop: StopRequest) -> None:
    one = replace(ROLES, ranks=1, machines=1, servers=0)
    group = placed(one, "CPU", stop)
    [rank], _ = actors(one, group, "CPU", "folder")
    rank.place()
    with pytest.raises(Refused, match="has no folder /none, in which the run was started"):
        rank.start(("-c", ""), {}, "/none", None)
    remove_placement_group(group)


def test_a_run_that_waits_for_others_says_so_and_can_be_ended(
    cluster: Cluster, stop: StopRequest, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(on_ray, "_NAMED_SECONDS", 0.1)
    group = placed(ROLES, "CPU", stop)
    Timer(2, os.kill, [os.getpid(), signal.SIGTERM]).start()
    with pytest.raises(SystemExit, match="143"):
        placed(ROLES, "CPU", stop)
    assert "waits for 5 CPUs, of which 0 are free in the cluster" in capfd.readouterr().err
    remove_placement_group(group)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "nothing answers there .*; start one with `ray start --head`, or unset RAY_ADDRESS"),
        ("none.invalid:6379", "nothing answers there"),
        ("127.0.0.1:99999", "nothing answers there"),
        ("ray://127.0.0.1:10001", "is not the address of a cluster; use HOST:6379"),
        ("localhost", "is not the address of a cluster"),
    ],
)
def test_an_address_without_a_cluster_is_refused(address: str, message: str) -> None:
    with pytest.raises(Refused, match=f"RAY_ADDRESS={address}:? {message}"):
        on_ray.run_on_ray(ROLES, {"RAY_ADDRESS": address}, "CPU")


def test_roles_that_the_cluster_cannot_hold_are_refused(cluster: Cluster) -> None:
    with pytest.raises(Refused, match=r"the cluster has 5 CPUs \(3, 2 on its 2 machines\)"):
        refuse_too_few(replace(ROLES, ranks=8), "CPU", [node["Resources"] for node in ray.nodes() if node["Alive"]])
