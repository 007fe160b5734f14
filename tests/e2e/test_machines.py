"""Real ranks on two machines: their clocks disagree, one is lost, others continue, each has a disk of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from swift_megatron_grpo.output.checkpoints.newest import find_newest, saved_at
from tests.forking.programs import script_of_swift
from tests.paths import PROGRAMS
from tests.support.choice import rest_nightly
from tests.support.machines import Machines, Started, namespaces, needs_namespaces, two_machines
from tests.support.runs import CANNED, grpo_flags, megatron_rlhf, read_json_lines

pytestmark = pytest.mark.e2e
FLAGS = [*CANNED, "--tensor_model_parallel_size", "2", "--no_save_optim", "false", "--no_save_rng", "false",
         "--save_steps", "2", "--lr_decay_style", "constant", "--seed", "7", "--torch_dtype", "float32",
         "--fp16", "false", "--add_version", "true", "--resume", "auto"]  # fmt: skip
REFUSED = "swift_megatron_grpo: this run was refused"


@pytest.fixture
def etc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("etc")


@pytest.fixture(scope="module")
def clock(folder: Path) -> Path:
    """Return a library that shifts the clock of a process."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc, for a library that shifts the clock of a process")
    library = folder / "shifted_clock.so"
    source = PROGRAMS / "e2e" / "shifted_clock.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source)], check=True)
    return library


def wait_for_checkpoint(output_dir: Path, step: int) -> None:
    end = time.monotonic() + 300
    while (newest := find_newest(output_dir)[0]) is None or newest.step < step:
        assert time.monotonic() < end, "no checkpoint is saved"
        time.sleep(0.2)


def start_torchruns(machines: Machines, flags: Sequence[str], folder: Path) -> list[Started]:
    script = Path(script_of_swift("_megatron/rlhf.py"))
    return [machines.torchrun(number, script, *flags, folder=folder) for number in (0, 1)]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_run_continues_after_a_loss_with_clocks_an_hour_apart(
    folder: Path, dense: Path, dataset: Path, clock: Path, etc: Path
) -> None:
    """Machine 0 is an hour ahead; the one that has its place later is an hour behind. Both run the real command."""
    output, megatron = folder / "run", str(Path(sys.executable).with_name("megatron"))

    def start(machines: Machines, hours: int, steps: int) -> list[Started]:
        flags = grpo_flags(dense, dataset, output, [*FLAGS, "--train_iters", str(steps), "--node_timeout", "12"])
        of_first = {"LD_PRELOAD": str(clock), "CLOCK_SHIFT": str(hours * 3600)}
        return [
            machines.command(number, megatron, "rlhf", *flags, folder=folder, **environ)
            for number, environ in enumerate((of_first, {}))
        ]

    whole = megatron_rlhf(dense, dataset, folder / "whole", 2, [*FLAGS, "--add_version", "false", "--train_iters", "4"])
    with two_machines(etc) as machines:
        began = time.time()
        run = start(machines, 1, 1000)
        wait_for_checkpoint(output, 4)
        machines.cut(1)
        code, printed = run[0].finish(120)
        machines.kill(1)
        machines.join(1)
        newest, _ = find_newest(output)
        assert code == 1 and newest is not None and saved_at(newest.folder) - began > 3600
        last = printed.rstrip("\n").rpartition("\n")[2]
        assert f"machine 1 ({machines.names[1]}, rank 1) is lost: it has not answered for 1" in last
        assert f"the newest whole checkpoint is {newest.folder}. To continue" in last
        ends = [machine.finish(300) for machine in start(machines, -1, newest.step + 4)]
    assert [code for code, _ in ends] == [0, 0], ends[0][1][-4000:]
    assert f"--resume auto: the run continues from step {newest.step}, in {newest.folder}" in ends[0][1]
    continued, skipped = find_newest(output)
    assert continued is not None and continued.folder == newest.run_folder / f"checkpoint-{newest.step + 4}"
    assert not skipped
    log = [row for row in read_json_lines(newest.run_folder / "logging.jsonl") if "loss" in row]
    assert [int(row["iteration"].partition("/")[0]) for row in log] == list(range(1, newest.step + 5))
    for row, expected in zip(log, whole.log, strict=False):
        assert [row[name] for name in ("loss", "grad_norm", "reward")] == [
            expected[name] for name in ("loss", "grad_norm", "reward")
        ]


@needs_namespaces
@pytest.mark.parametrize("earlier", rest_nightly(["none", "copied", "of machine 0"], ["none"]))
def test_a_disk_of_each_machine_is_refused_before_a_model_loads(
    tmp_path: Path, dense: Path, dataset: Path, etc: Path, earlier: str
) -> None:
    """`earlier`: the checkpoints of an earlier run on one machine. Copied: both machines have them."""
    output = tmp_path / "run"
    output.mkdir()
    if earlier != "none":
        run = megatron_rlhf(dense, dataset, output, 2, [*FLAGS, "--train_iters", "2", "--add_version", "false"])
        assert run.code == 0, run.output[-4000:]
    shutil.copytree(output, tmp_path / "copy")
    flags = grpo_flags(dense, dataset, output, [*FLAGS, "--train_iters", "4"])
    with namespaces(etc) as machines:
        machines.run(1, "mount", "-t", "tmpfs", "none", str(output))
        if earlier == "copied":
            machines.run(1, "cp", "-r", f"{tmp_path}/copy/.", str(output))
        ends = [machine.finish(200) for machine in start_torchruns(machines, flags, tmp_path)]
    for code, printed in ends:
        message = printed.partition(REFUSED)[2]
        assert code == 1 and "Traceback" not in printed and "Successfully saved" not in printed
        if earlier == "of machine 0":
            assert f"ranks see different checkpoints: rank 0 {output}/checkpoint-2, rank 1 none; put --outpu" in message
        else:
            assert "machine-b does not see what rank 0 has written there, so checkpoints would lack parts; u" in message


@pytest.mark.nightly
@needs_namespaces
def test_a_disk_that_a_machine_loses_ends_the_run_at_the_next_save(
    tmp_path: Path, dense: Path, dataset: Path, etc: Path
) -> None:
    """The mount point is a folder of that machine then, to which its rank can write. The run continues without it."""
    output = tmp_path / "run"
    output.mkdir()
    plain = [*FLAGS, "--add_version", "false"]
    with namespaces(etc) as machines:
        flags = grpo_flags(dense, dataset, output, [*plain, "--train_iters", "1000"])
        run = start_torchruns(machines, flags, tmp_path)
        wait_for_checkpoint(output, 2)
        machines.run(1, "mount", "-t", "tmpfs", "none", str(output))
        code, printed = run[0].finish(120)
        assert code == 1 and run[1].finish(120)[0] == 1
        newest, _ = find_newest(output)
        assert newest is not None
        split = output / f"checkpoint-{newest.step + 2}"
        assert f"{split} lacks __1_0.distcp, which rank 1 on machine-b has written: {output} is no longer" in printed
        assert f"the newest whole one is {newest.folder}" in printed
        machines.run(1, "umount", str(output))
        flags = grpo_flags(dense, dataset, output, [*plain, "--train_iters", str(newest.step + 2)])
        ends = [machine.finish(200) for machine in start_torchruns(machines, flags, tmp_path)]
        assert [code for code, _ in ends] == [0, 0], ends[0][1][-4000:]
    continued, _ = find_newest(output)
    assert continued is not None and continued.folder == split
