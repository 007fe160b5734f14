"""A lost machine ends the run on the others with one line: real torchruns on this machine, small ranks over gloo."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from swift_megatron_grpo.plugin.lost_machine import LossOfMachine
from tests.support.machines import Machines, Processes, Started, ended, namespaces, needs_namespaces, two_machines
from tests.unit.output.checkpoints.test_newest import saved

# Each rank writes the number of its step. In each step the ranks of both machines agree on whether it is the last one.
RANK = """
import contextlib, os, sys, time
import torch, torch.distributed as dist
from swift_megatron_grpo.runtime.refusals import lost_connections_reported_by_torchrun
dist.init_process_group("gloo")
with lost_connections_reported_by_torchrun():
    for step in range(2000):
        done = torch.tensor(float(os.path.exists("done")))
        dist.all_reduce(done)
        if os.path.exists("fail") and dist.get_rank() == 1:
            raise ValueError("a step failed")
        if done:
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


def start(machines: Machines, folder: Path, *flags: str, rank: str = RANK) -> list[Started]:
    return [start_one(machines, folder, number, *flags, rank=rank) for number in (0, 1)]


def start_one(machines: Machines, folder: Path, number: int, *flags: str, rank: str = RANK, **environ: str) -> Started:
    script = folder / "swift" / "cli" / "_megatron" / "rlhf.py"  # by which torchrun is known to be ms-swift's
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(rank)
    flags = ("--rlhf_type", "grpo", "--output_dir", str(folder / "output"), *flags)
    return machines.torchrun(number, script, *flags, folder=folder, **environ)


def wait_for_steps(folder: Path, steps: int) -> None:
    first, end = steps_of(folder), time.monotonic() + 60
    while any(step < before + steps for step, before in zip(steps_of(folder), first, strict=True)):
        assert time.monotonic() < end, "the ranks do not train"
        time.sleep(0.05)


def steps_of(folder: Path) -> list[int]:
    files = [folder / f"step{number}" for number in (0, 1)]
    return [int(file.read_text() or "0") if file.exists() else 0 for file in files]


@pytest.fixture
def etc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("etc")


@pytest.fixture(params=["namespaces", pytest.param("processes", marks=pytest.mark.nightly)])
def machines(request: pytest.FixtureRequest, etc: Path) -> Iterator[Machines]:
    """Yield two namespaces where this machine allows them, else processes."""
    with two_machines(etc) if request.param == "namespaces" else ended(Processes()) as two:
        yield two


def closing_line(output: str) -> str:
    """Return the last line of a torchrun that has ended, and check that it prints neither tracebacks nor tables."""
    assert "Traceback" not in output and "ChildFailedError" not in output and "gloo" not in output, output
    return output.rstrip("\n").rpartition("\n")[2]


def test_the_line_is_the_last_one_after_a_warning_of_torch(tmp_path: Path) -> None:
    said: list[str] = []

    class OutOfReach:
        """Machines behind a store that does not answer."""

        def look(self) -> None: ...

        def ended(self) -> None: ...

        def news(self, end_after: float) -> list[str]:
            return []

        def lost(self, seconds: float) -> str:
            return "machine 1 is lost"

        def end(self, reason: str) -> None:
            said.append("[c10d] waitForInput: timed out after 10000ms")

    loss = LossOfMachine(cast(Any, OutOfReach()), [], tmp_path, lambda: None, said.append)
    assert loss.ends_run() and len(said) == 2 and said[-1].startswith("machine 1 is lost. The ranks of this machine")


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_killed_machine_ends_the_run_with_one_line(machines: Machines, tmp_path: Path, killed: int) -> None:
    """Machine 0 has the store of the rendezvous."""
    newest = saved(tmp_path / "output", 20, at=50.0)
    run = start(machines, tmp_path)
    wait_for_steps(tmp_path, 20)
    began = time.monotonic()
    machines.kill(killed)
    code, output = run[1 - killed].finish(90)
    assert code == 1 and time.monotonic() - began < 25
    line = closing_line(output)
    who = f"machine {killed} ({machines.names[killed]}, rank {killed})"
    assert line.startswith(f"swift_megatron_grpo: {who} is lost: it has not answered for ")
    assert line.endswith(
        f"the newest whole checkpoint is {newest}. To continue, on these or other machines, use the same command with "
        "--resume auto"
    )


@pytest.mark.parametrize("waits", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_machine_that_never_begins_is_named(tmp_path: Path, waits: int) -> None:
    with ended(Processes()) as machines:
        waiting = start_one(machines, tmp_path, waits, PET_RDZV_CONF="timeout=6")
        code, output = waiting.finish(60)
    absent, place = 1 - waits, f"127.0.0.1:{machines.port}"
    said = f"swift_megatron_grpo: machine {waits} waits for machine {absent} to begin, at {place}. Start the same"
    assert code == 1 and said in output
    line = closing_line(output)
    assert f"machine {absent} has not begun within 6 s, so machine {waits} ends. Start the same command on" in line
    assert line.endswith("PET_RDZV_CONF=timeout=12 on all of them waits longer")


@pytest.mark.thorough
@pytest.mark.parametrize("cut", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_machine_that_is_cut_off_is_named_and_the_run_goes_on(machines: Machines, tmp_path: Path, cut: int) -> None:
    run = start(machines, tmp_path, "--node_timeout", "48")
    wait_for_steps(tmp_path, 20)
    machines.cut(cut)
    time.sleep(30)  # half of the time after which the run ends is 24 s
    machines.join(cut)
    wait_for_steps(tmp_path, 20)
    time.sleep(4)
    (tmp_path / "done").touch()
    ends = [machine.finish(90) for machine in run]
    assert [code for code, _ in ends] == [0, 0]
    for number in (0, 1) if machines.run_when_cut else (1 - cut,):
        first, second = (line for line in ends[number][1].splitlines() if line.startswith("swift_megatron_grpo: "))
        who = f"machine {1 - number} ({machines.names[1 - number]}, rank {1 - number})"
        assert f"{who} has not answered for 24 s; the run ends after 48 s (--node_timeout)" in first
        assert second.endswith(f"{who} answers again")


@pytest.mark.thorough
@pytest.mark.parametrize("cut", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_machine_that_stays_away_ends_the_run_everywhere(machines: Machines, tmp_path: Path, cut: int) -> None:
    run = start(machines, tmp_path, "--node_timeout", "12", "--resume", "auto")
    wait_for_steps(tmp_path, 20)
    machines.cut(cut)
    code, output = run[1 - cut].finish(90)
    assert code == 1
    line = closing_line(output)
    assert f"machine {cut} ({machines.names[cut]}" in line and "is lost: it has not answered for 1" in line
    assert "has no whole checkpoint to continue from, so the same command begins again" in line
    if not machines.run_when_cut:
        machines.join(cut)  # too late
    code, output = run[cut].finish(90)
    assert code == 1 and f"machine {1 - cut} ({machines.names[1 - cut]}" in closing_line(output)


@pytest.mark.nightly
@needs_namespaces
@pytest.mark.parametrize("senders", [(0, 1), (0,), (1,)])
def test_lost_packets_end_the_run_everywhere(tmp_path: Path, etc: Path, senders: tuple[int, ...]) -> None:
    """No machine sees an error: its link is up, and what it sends, or receives, is lost on the way."""
    with namespaces(etc) as machines:
        run = start(machines, tmp_path, "--node_timeout", "12")
        wait_for_steps(tmp_path, 20)
        for sender in senders:
            machines.lose_packets(sender)
        for number, machine in enumerate(run):
            code, output = machine.finish(90)
            who = f"machine {1 - number} ({machines.names[1 - number]}"
            assert code == 1 and f"{who}, rank {1 - number}) is lost: it has not answered for 1" in closing_line(output)


@pytest.mark.nightly
@needs_namespaces
def test_packets_that_are_lost_for_a_while_are_made_up_for(tmp_path: Path, etc: Path) -> None:
    with namespaces(etc) as machines:
        run = start(machines, tmp_path, "--node_timeout", "60")
        for _ in range(3):
            wait_for_steps(tmp_path, 20)
            machines.lose_packets(1)
            time.sleep(5)
            machines.deliver_packets(1)
        wait_for_steps(tmp_path, 20)
        (tmp_path / "done").touch()
        ends = [machine.finish(90) for machine in run]
        assert [code for code, _ in ends] == [0, 0], ends
        assert not [output for _, output in ends if "swift_megatron_grpo: " in output], ends


def test_a_rank_that_fails_is_named_on_the_other_machine(machines: Machines, tmp_path: Path) -> None:
    run = start(machines, tmp_path)
    wait_for_steps(tmp_path, 20)
    (tmp_path / "fail").touch()
    code, output = run[0].finish(90)
    assert code == 1
    who = f"swift_megatron_grpo: machine 1 ({machines.names[1]}, rank 1)"
    assert f"{who} has ended: local rank 0, exit code 1. The ra" in closing_line(output)
    code, output = run[1].finish(90)
    assert code == 1 and "ValueError: a step failed" in output


def test_what_has_started_torchrun_learns_which_rank_failed(machines: Machines, tmp_path: Path) -> None:
    said = [tmp_path / "said0", tmp_path / "said1"]
    run = [
        start_one(machines, tmp_path, number, SWIFT_MEGATRON_GRPO_FAILURE=str(file)) for number, file in enumerate(said)
    ]
    wait_for_steps(tmp_path, 5)
    (tmp_path / "fail").touch()
    assert [machine.finish(60)[0] for machine in run] == [1, 1]
    assert said[1].read_text() == "rank 1 has ended: exit code 1" and not said[0].exists()


def test_a_full_disk_of_one_machine_is_named_on_both(machines: Machines, tmp_path: Path) -> None:
    """A limit on the size of a file stands in for the full disk: it needs no rights."""
    (tmp_path / "output").mkdir()
    for machine in start(machines, tmp_path, rank=SAVING_RANK):
        code, output = machine.finish(90)
        assert code == 1
        disk = f"{tmp_path}/output/checkpoint-2 could not be written by rank 1 on {machines.names[1]}: a file may not"
        [line] = {line for line in output.splitlines() if disk in line}
        assert line.endswith(f"the newest whole one is {tmp_path}/output/checkpoint-1")
    assert not (tmp_path / "output" / "checkpoint-2").exists()
