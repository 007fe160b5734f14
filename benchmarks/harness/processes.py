"""Starts `megatron rlhf` once for each arm and setting, in turns, and brings home what the plugin measured."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from .job import VARIABLE, Job
from .results import ARMS, Process, Run, merge_ranks

REPOSITORY = Path(__file__).parents[2]
PLUGIN = Path(__file__).parent / "instrument" / "plugin.py"
OUT_OF_MEMORY = ("OutOfMemoryError", "CUDA out of memory")
PATIENCE = 45  # seconds for torchrun to end its ranks
LONGEST_ANSWER = 400  # characters of a failure's reason


@dataclass(frozen=True)
class Setting:
    """What one arm is measured with, beyond the flags of both."""

    arm: str
    name: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    job: Job  # arm and folder are filled in for each process
    flags: list[str]  # of both arms
    ranks: int
    rounds: int
    steps: int  # of a process, warm-up included
    warm_up: int
    timeout: float  # seconds for a process
    ahead: bool  # start a process while the one before still measures; it waits before it touches the device
    folder: Path
    gpu: bool
    omp_threads: int
    deadline: float  # time.monotonic() by which all must be done; no process starts that would not make it


def measure(plan: Plan, settings: Sequence[Setting], run: Run) -> Iterator[Process]:
    """Round after round, ours and stock in turns. After the first round only what a comparison needs."""
    ordered = interleave(settings)
    for number in range(plan.rounds):
        if number:
            ordered = [each for each in ordered if (each.arm, each.name) in worth_repeating(run)]
        queue = _Queue(plan)
        for place, setting in enumerate(ordered):
            following = ordered[place + 1] if plan.ahead and place + 1 < len(ordered) else None
            process = queue.finish(setting, following)
            if process is None:
                return
            run.processes.append(process)
            yield process


def interleave(settings: Sequence[Setting]) -> list[Setting]:
    """A B A B ..."""
    queues = [[each for each in settings if each.arm == arm] for arm in ARMS]
    ordered = []
    while any(queues):
        ordered += [queue.pop(0) for queue in queues if queue]
    return ordered


def worth_repeating(run: Run) -> set[tuple[str, str]]:
    pairs = [(side.arm, side.setting) for each in run.comparisons() for side in (each.ours, each.stock)]
    return set(pairs)


class _Queue:
    """Processes of one round; at most one of them has the device."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._waiting: tuple[Path, subprocess.Popen[bytes]] | None = None
        self._longest = 0.0

    def finish(self, setting: Setting, following: Setting | None) -> Process | None:
        """None: the time is up."""
        left = self._plan.deadline - time.monotonic()
        folder, process = self._waiting or start(self._plan, setting)
        if left < self._longest:
            _kill(process)
            return None
        began = time.monotonic()
        (folder / "go").touch()
        self._waiting = start(self._plan, following) if following else None
        try:
            status = _wait(process, min(left, self._plan.timeout), folder)
            self._longest = max(self._longest, time.monotonic() - began)
            return _collect(self._plan, setting, folder, status)
        except BaseException:
            _kill(process)
            if self._waiting:
                _kill(self._waiting[1])
            raise


def start(plan: Plan, setting: Setting) -> tuple[Path, subprocess.Popen[bytes]]:
    folder = plan.folder / f"{setting.arm}-{setting.name}-{time.time_ns()}"
    folder.mkdir(parents=True)
    job = Job(**{**_fields(plan.job), "arm": setting.arm, "folder": str(folder)}).write()
    paths = [str(REPOSITORY), str(plan.folder), os.environ.get("PYTHONPATH")]
    environment = {
        **os.environ,
        VARIABLE: str(job),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "SWIFT_MEGATRON_GRPO": "on" if setting.arm == "ours" else "off" if plan.gpu else "platform",
        "NPROC_PER_NODE": str(plan.ranks),
        "MASTER_PORT": str(random.randint(20000, 32000)),
        "OMP_NUM_THREADS": str(plan.omp_threads),
        "HF_HUB_OFFLINE": "1",
        "MODELSCOPE_OFFLINE": "1",
    }
    command = [*program(), "rlhf", *plan.flags, "--external_plugins", str(PLUGIN), "--train_iters", str(plan.steps),
               "--output_dir", str(folder / "output"), *setting.flags]  # fmt: skip
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT,
                                   start_new_session=True)  # fmt: skip
    return folder, process


def make_entry_point(folder: Path) -> None:
    """What makes torch call this package, in a folder for PYTHONPATH: for machines where it is not installed."""
    if any(each.module.startswith("swift_megatron_grpo") for each in entry_points(group="torch.backends")):
        return
    metadata = folder / "swift_megatron_grpo-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: swift-megatron-grpo\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[torch.backends]\nswift_megatron_grpo = swift_megatron_grpo.plugin.autoload:arm\n"
    )


def program() -> list[str]:
    """`megatron`, or what it runs where scripts are not installed."""
    beside = Path(sys.executable).with_name("megatron")
    found = str(beside) if beside.exists() else shutil.which("megatron")
    return [found] if found else [sys.executable, "-P", "-m", "swift.cli._megatron.main"]


def _fields(job: Job) -> dict[str, Any]:
    return {name: getattr(job, name) for name in Job.__slots__}


def _wait(process: subprocess.Popen[bytes], timeout: float, folder: Path) -> str:
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        _kill(process)
        return f"failed: not done after {timeout:g} s, see {folder / 'log.txt'}"
    log = (folder / "log.txt").read_text(errors="replace")
    if code == 0:
        return "ok"
    if any(sign in log for sign in OUT_OF_MEMORY):
        return "out of memory"
    return f"failed: {_reason(log) or f'exit code {code}'} (log: {folder / 'log.txt'})"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With its ranks. Those are in sessions of their own, and torchrun, told politely, ends them within 30 seconds."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    until = time.monotonic() + PATIENCE
    while _group_lives(process.pid) and time.monotonic() < until:
        process.poll()
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _reason(log: str) -> str:
    """The last exception of a rank, with the line after it; torchrun's own says only that a rank failed."""
    lines = log.splitlines()
    said = [i for i, line in enumerate(lines) if re.search(r"(Error|Exception): ", line) and "ChildFailed" not in line]
    return " ".join(lines[said[-1] : said[-1] + 2])[-LONGEST_ANSWER:] if said else ""


def _collect(plan: Plan, setting: Setting, folder: Path, status: str) -> Process:
    ranks = read_ranks(folder, plan.ranks) if status == "ok" else []
    if ranks:
        _check_tokens(plan, setting, ranks)
    return Process(setting.arm, setting.name, status, merge_ranks(ranks, plan.warm_up), list(setting.flags))


def read_ranks(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def _check_tokens(plan: Plan, setting: Setting, ranks: Sequence[dict[str, Any]]) -> None:
    """Whether the arm trained what it was given: all of it and nothing else."""
    completions = sum(map(sum, plan.job.completion_tokens))
    prompts = sum(
        prompt * len(group) for prompt, group in zip(plan.job.prompt_tokens, plan.job.completion_tokens, strict=True)
    )
    expected = (prompts + completions, completions)
    # Our engine is given the whole step on every rank; ms-swift's ranks encode what their data-parallel rank trains.
    model_parallel = 1 if setting.arm == "ours" else plan.ranks // _data_parallel(setting, plan.ranks)
    seen = [sum(rank[key] for rank in ranks) // model_parallel for key in ("tokens", "completion_tokens")]
    if setting.arm == "ours":
        seen = [total // plan.ranks for total in seen]
    if tuple(seen) != expected:
        raise SystemExit(
            f"{setting.arm} {setting.name}: trained {seen[0]} tokens, {seen[1]} of completions, instead of "
            f"{expected[0]} and {expected[1]}: the arms did not do the same work"
        )


def _data_parallel(setting: Setting, ranks: int) -> int:
    flags = dict(zip(setting.flags, setting.flags[1:], strict=False))
    for flag in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        ranks //= int(flags.get(f"--{flag}", 1))
    return ranks
