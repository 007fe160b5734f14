"""A lost machine ends the run on the others with one line: real torchruns on this machine, small ranks over gloo."""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.forking.client import free_port, start_piped
from tests.paths import IMPORT_PATH
from tests.unit.output.checkpoints.test_newest import saved

# Each rank writes the number of its step. The ranks of both machines add a number in each step.
RANK = """
import contextlib, os, sys, time
import torch, torch.distributed as dist
from swift_megatron_grpo.runtime.refusals import lost_connections_reported_by_torchrun
dist.init_process_group("gloo")
with lost_connections_reported_by_torchrun():
    for step in range(2000):
        dist.all_reduce(torch.ones(1))
        if os.path.exists("fail") and dist.get_rank() == 1:
            raise ValueError("a step failed")
        if os.path.exists("done"):
            break
        with open(f"step{dist.get_rank()}", "w") as file:
            file.write(str(step))
        time.sleep(0.05)
dist.barrier()
"""


# Each rank saves its part of two checkpoints. Before the second one, the disk of machine 1 is full.
SAVING_RANK = """
import resource
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed import checkpoint
from swift_megatron_grpo.output.checkpoints.saving import CheckpointWriter
from swift_megatron_grpo.runtime.refusals import lost_connections_reported_by_torchrun
from tests.unit.output.checkpoints.saved import IDENTITY

class Ranks:
    def __init__(self):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
    def all_gather(self, value):
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values
    def all_gather_or_raise(self, work, task):
        return self.all_gather(work())

dist.init_process_group("gloo")
output = Path("output").absolute()
writer = CheckpointWriter(output, Ranks(), 1, IDENTITY, print)
with lost_connections_reported_by_torchrun():
    for step in (1, 2):
        if step == 2 and dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
        with writer.writing(step, 0, 0.0):
            weights = {f"of rank {dist.get_rank()}": torch.ones(2**18)}
            checkpoint.save(weights, storage_writer=checkpoint.FileSystemWriter(output / f"checkpoint-{step}"))
        writer.finish()
"""


started: list[Machine] = []


class Machine:
    """A torchrun of a run on two machines, and its rank."""

    def __init__(self, folder: Path, number: int, port: int, *flags: str, rank: str = RANK, **environ: str) -> None:
        self.folder, self.number = folder, number
        script = folder / "swift" / "cli" / "_megatron" / "rlhf.py"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(rank)
        torchrun = str(Path(sys.executable).with_name("torchrun"))
        command = [torchrun, "--nnodes", "2", "--nproc_per_node", "1", "--node_rank", str(number),
                   "--master_addr", "127.0.0.1", "--master_port", str(port), str(script), "--rlhf_type", "grpo",
                   "--output_dir", str(folder / "output"), *flags]  # fmt: skip
        self.process, self._output = start_piped("trainer", "torchrun", *command, folder=folder, PYTHONPATH=IMPORT_PATH,
                                                   **environ)  # fmt: skip
        started.append(self)

    def step(self) -> int:
        file = self.folder / f"step{self.number}"
        return int(file.read_text() or "0") if file.exists() else 0

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes at once, as when the machine loses its power, or its link (SIGSTOP)."""
        torchrun = psutil.Process(self.process.pid)
        for process in [torchrun, *torchrun.children(recursive=True)]:
            process.send_signal(number)

    def finish(self, seconds: float) -> tuple[int, str]:
        code = self.process.wait(timeout=seconds)
        with self._output:
            return code, self._output.read()


Machines = tuple[Machine, Machine]


def start(folder: Path, *flags: str) -> Machines:
    port = free_port()
    machines = (Machine(folder, 0, port, *flags), Machine(folder, 1, port, *flags))
    wait_for_steps(machines, 20)
    return machines


def wait_for_steps(machines: Machines, steps: int) -> None:
    first, end = [machine.step() for machine in machines], time.monotonic() + 60
    while any(machine.step() < before + steps for machine, before in zip(machines, first, strict=True)):
        assert time.monotonic() < end, "the ranks do not train"
        time.sleep(0.05)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    while started:  # those of a test that has failed, some of them stopped
        machine = started.pop()
        if machine.process.poll() is None:
            machine.signal(signal.SIGKILL)


def closing_line(output: str) -> str:
    """Return the last line of a torchrun that has ended, and check that it prints neither tracebacks nor tables."""
    assert "Traceback" not in output and "ChildFailedError" not in output and "gloo" not in output, output
    return output.rstrip("\n").rpartition("\n")[2]


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_killed_machine_ends_the_run_with_one_line(folder: Path, killed: int) -> None:
    """Machine 0 has the store of the rendezvous."""
    newest = saved(folder / "output", 20, at=50.0)
    machines = start(folder)
    began = time.monotonic()
    machines[killed].signal(signal.SIGKILL)
    code, output = machines[1 - killed].finish(90)
    assert code == 1 and time.monotonic() - began < 25
    line = closing_line(output)
    assert line.startswith(f"swift_megatron_grpo: machine {killed} (") and f"rank {killed}) is lost: it has not" in line
    assert line.endswith(
        f"the newest whole checkpoint is {newest}. To continue, on these or other machines, use the same command with "
        "--resume auto"
    )


@pytest.mark.thorough
def test_a_machine_that_is_cut_off_is_named_and_the_run_goes_on(folder: Path) -> None:
    machines = start(folder, "--node_timeout", "40")
    machines[1].signal(signal.SIGSTOP)
    time.sleep(27)  # half of the time after which the run ends is 20 s
    machines[1].signal(signal.SIGCONT)
    wait_for_steps(machines, 20)
    time.sleep(4)
    (folder / "done").touch()
    code, output = machines[0].finish(90)
    assert code == 0 and machines[1].finish(90)[0] == 0
    first, second = (line for line in output.splitlines() if line.startswith("swift_megatron_grpo: "))
    assert "rank 1) has not answered for 20 s; the run ends after 40 s (--node_timeout)" in first
    assert second.endswith("rank 1) answers again")


@pytest.mark.thorough
@pytest.mark.parametrize("cut", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_machine_that_stays_away_ends_the_run_everywhere(folder: Path, cut: int) -> None:
    machines = start(folder, "--node_timeout", "12", "--resume", "auto")
    machines[cut].signal(signal.SIGSTOP)
    code, output = machines[1 - cut].finish(90)
    assert code == 1
    line = closing_line(output)
    assert f"machine {cut} (" in line and "is lost: it has not answered for 1" in line
    assert "has no whole checkpoint to continue from, so the same command begins again" in line
    machines[cut].signal(signal.SIGCONT)  # its link returns too late
    code, output = machines[cut].finish(90)
    assert code == 1 and f"machine {1 - cut} (" in closing_line(output)


def test_a_rank_that_fails_is_named_on_the_other_machine(folder: Path) -> None:
    machines = start(folder)
    (folder / "fail").touch()
    code, output = machines[0].finish(90)
    assert code == 1
    line = closing_line(output)
    assert "swift_megatron_grpo: machine 1 (" in line and "rank 1) has ended: local rank 0, exit code 1. The ra" in line
    code, output = machines[1].finish(90)
    assert code == 1 and "ValueError: a step failed" in output


def test_what_has_started_torchrun_learns_which_rank_failed(folder: Path) -> None:
    port = free_port()
    said = [folder / "said0", folder / "said1"]
    machines = [
        Machine(folder, number, port, SWIFT_MEGATRON_GRPO_FAILURE=str(file)) for number, file in enumerate(said)
    ]
    wait_for_steps((machines[0], machines[1]), 5)
    (folder / "fail").touch()
    assert [machine.finish(60)[0] for machine in machines] == [1, 1]
    assert said[1].read_text() == "rank 1 has ended: exit code 1" and not said[0].exists()


def test_a_full_disk_of_one_machine_is_named_on_both(folder: Path) -> None:
    """A limit on the size of a file stands in for the full disk: it needs no rights."""
    (folder / "output").mkdir()
    port = free_port()
    machines = [Machine(folder, number, port, rank=SAVING_RANK) for number in (0, 1)]
    for machine in machines:
        code, output = machine.finish(90)
        assert code == 1
        disk = f"{folder}/output/checkpoint-2 could not be written by rank 1 on {socket.gethostname()}: a file may not"
        [line] = {line for line in output.splitlines() if disk in line}
        assert line.endswith(f"the newest whole one is {folder}/output/checkpoint-1")
    assert not (folder / "output" / "checkpoint-2").exists()
