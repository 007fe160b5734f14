"""Start each trainer with each setting in alternation, and collect what they measured."""

from __future__ import annotations

import fcntl
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from .free_gpus import wait_until_free
from .job import VARIABLE, Job
from .paths import REPOSITORY
from .results import ARMS, Process, Run, merge_ranks

PLUGIN = Path(__file__).parent / "instrument" / "plugin.py"
OUT_OF_MEMORY = ("OutOfMemoryError", "CUDA out of memory")
SMALLER_BUDGET = "it is run again with"  # in the warning of this package, which then has another setting than its name
TERMINATION_TIMEOUT = 45  # seconds for torchrun to end its ranks
REFUSED = "swift_megatron_grpo: this run"  # what the message of the set-up starts with
LOG_OF_TORCH = re.compile(r"(\[rank\d+\]:)?\[?[IWE]\d{4} \d\d:")  # of processes that end
NOT_FINISHED = "failed: not finished after"  # what a process that was ended at its limit has as its status
MAX_REASON = 400  # characters of a failure's reason
LOCKS = Path(tempfile.gettempdir())
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


@dataclass(frozen=True)
class Setting:
    """Flags of one trainer, in addition to its command."""

    arm: str
    name: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    job: Job  # arm and folder are set for each process
    commands: dict[str, list[str]]  # of each arm, with everything but output folder and setting
    ranks: int
    rounds: int
    steps: int  # of each process, with those of the warm-up
    warm_up: int
    timeout: float  # seconds for a process
    ahead: bool  # start a process while the previous one measures; it waits before it uses the device
    folder: Path
    gpu: bool
    beside_servers: bool  # whose memory on the GPUs is in use before a process starts
    omp_threads: int
    deadline: float  # time.monotonic() for the whole run; no process starts that is unlikely to finish in time


def measure(plan: Plan, settings: Sequence[Setting], run: Run) -> Iterator[Process]:
    """Measure all settings, the trainers alternating; later rounds repeat only what a comparison uses."""
    ordered = interleave(settings)
    for number in range(plan.rounds):
        if number:
            compared = run.compared_settings()
            ordered = [setting for setting in ordered if (setting.arm, setting.name) in compared]
        queue = _Queue(plan)
        for place, setting in enumerate(ordered):
            following = ordered[place + 1] if plan.ahead and place + 1 < len(ordered) else None
            process = queue.finish(setting, following)
            if process is None:
                return
            run.processes.append(process)
            yield process


def interleave(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings in the order A B A B ..., where A and B are trainers."""
    queues = [[setting for setting in settings if setting.arm == arm] for arm in ARMS]
    ordered = []
    while any(queues):
        ordered += [queue.pop(0) for queue in queues if queue]
    return ordered


class _Queue:
    """Processes of one round; at most one of them uses the device at a time."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._waiting: tuple[Path, subprocess.Popen[bytes]] | None = None
        self._longest = 0.0

    def finish(self, setting: Setting, following: Setting | None) -> Process | None:
        """Measure one setting and start the next process; return None if the deadline is too close."""
        folder, process = self._waiting or start(self._plan, setting)
        self._waiting = None
        try:
            with devices_locked():
                left = self._plan.deadline - time.monotonic()
                if left < self._longest:
                    kill(process)
                    return None
                if self._plan.gpu and not self._plan.beside_servers:
                    wait_until_free(visible_devices()[: self._plan.ranks])
                began = time.monotonic()
                (folder / "go").touch()
                self._waiting = start(self._plan, following) if following else None
                status = _wait(process, min(left, self._plan.timeout), folder)
                self._longest = max(self._longest, time.monotonic() - began)
            if status != "ok":
                print(f"bench: the log is {folder / 'log.txt'}", file=sys.stderr, flush=True)
            return _collect(self._plan, setting, folder, status)
        except BaseException:
            kill(process)
            if self._waiting:
                kill(self._waiting[1])
            raise


def exit_at_sigterm() -> None:
    """Exit through the handlers that end what was started, whose sessions a SIGTERM from `timeout` does not reach."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench: terminated"))


@contextmanager
def devices_locked() -> Iterator[None]:
    """Let one benchmark at a time use each GPU that this one sees; others start their next process meanwhile."""
    with ExitStack() as locks:
        for device in visible_devices():  # in order, so that two that see the same GPUs never wait for each other
            file = locks.enter_context((LOCKS / f"swift_megatron_grpo_benchmark_{device}.lock").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def visible_devices() -> list[str]:
    """Return the numbers of the GPUs that processes of this one see, or `cpu`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return sorted(visible.split(",")) if visible else ["cpu"]


def start(plan: Plan, setting: Setting) -> tuple[Path, subprocess.Popen[bytes]]:
    folder = plan.folder / f"{setting.arm}-{setting.name}-{time.time_ns()}"
    folder.mkdir(parents=True)
    job = Job(**{**_fields(plan.job), "arm": setting.arm, "folder": str(folder)}).write()
    paths = [str(REPOSITORY), str(plan.folder), os.environ.get("PYTHONPATH")]
    environment = {
        **os.environ,
        **({ALLOCATOR: allocator()} if setting.arm in ("ours", "stock") else {}),
        VARIABLE: str(job),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "SWIFT_MEGATRON_GRPO": switch_of(setting.arm, plan.gpu),
        "NPROC_PER_NODE": str(plan.ranks),
        "MASTER_PORT": str(random.randint(20000, 32000)),
        "OMP_NUM_THREADS": str(plan.omp_threads),
        "HF_HUB_OFFLINE": "1",
        "MODELSCOPE_OFFLINE": "1",
    }
    command = [*plan.commands[setting.arm], "--output_dir", str(folder / "output"), *setting.flags]
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT,
                                   start_new_session=True)  # fmt: skip
    return folder, process


def allocator() -> str:
    """Return the settings of PyTorch's allocator for both Megatron trainers, whose scripts set them."""
    return os.environ.get(ALLOCATOR, "expandable_segments:True")


def make_entry_point(folder: Path) -> None:
    """Make the entry point through which torch calls this package, where the package is not installed.

    The folder must be on PYTHONPATH.
    """
    if any(entry.module.startswith("swift_megatron_grpo") for entry in entry_points(group="torch.backends")):
        return
    metadata = folder / "swift_megatron_grpo-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: swift-megatron-grpo\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[torch.backends]\nswift_megatron_grpo = swift_megatron_grpo.plugin.autoload:arm\n"
    )


def switch_of(arm: str, gpu: bool) -> str:
    """Return the mode of this package in a process; ms-swift's trainer needs its CPU platform on a CPU."""
    if arm == "ours":
        return "on"
    return "platform" if arm == "stock" and not gpu else "off"


def program() -> list[str]:
    """Return the command `megatron`, or the module it runs where console scripts are not installed."""
    script = Path(sys.executable).with_name("megatron")
    path = str(script) if script.exists() else shutil.which("megatron")
    return [path] if path else [sys.executable, "-P", "-m", "swift.cli._megatron.main"]


def _fields(job: Job) -> dict[str, Any]:
    return {name: getattr(job, name) for name in Job.__slots__}


def _wait(process: subprocess.Popen[bytes], timeout: float, folder: Path) -> str:
    code = None
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        kill(process)
    log = (folder / "log.txt").read_text(errors="replace")
    if SMALLER_BUDGET in log:
        return "out of memory"
    if code is None:
        return f"{NOT_FINISHED} {timeout:g} s"
    if code == 0:
        return "ok"
    if any(sign in log for sign in OUT_OF_MEMORY):
        return "out of memory"
    return f"failed: {_reason(log) or f'exit code {code}'}"


def run_until(command: Sequence[str], environment: Mapping[str, str], console: Path, limit: float) -> int | None:
    """Run a command in the repository and return its exit code, or None if it was ended after `limit` seconds."""
    with console.open("wb") as file:
        process = subprocess.Popen(command, env=environment, cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT,
                                   start_new_session=True)  # fmt: skip
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and its ranks. Ranks have their own sessions; on SIGTERM torchrun ends them within 30 seconds."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + TERMINATION_TIMEOUT
    while _group_exists(process.pid) and time.monotonic() < deadline:
        process.poll()
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _reason(log: str) -> str:
    """Return the last exception of a rank and the line after it, or why this package refused the run.

    torchrun's own exception has no details.
    """
    lines = log.splitlines()
    if refused := [i for i, line in enumerate(lines) if line.startswith(REFUSED)]:
        return " ".join(lines[refused[-1] + 1 :])[:MAX_REASON]
    lines = [line for line in lines if not LOG_OF_TORCH.match(line)]
    at = [i for i, line in enumerate(lines) if re.search(r"(Error|Exception): ", line) and "ChildFailed" not in line]
    return " ".join(lines[at[-1] : at[-1] + 2])[-MAX_REASON:] if at else ""


def _collect(plan: Plan, setting: Setting, folder: Path, status: str) -> Process:
    ranks = []
    if status == "ok" or (status.startswith(NOT_FINISHED) and _has_steps(folder, plan)):
        status, ranks = "ok", read_ranks(folder, plan.ranks)  # the steps that it has made
        _check_tokens(plan, setting, ranks)
    return Process(setting.arm, setting.name, status, merge_ranks(ranks, plan.warm_up), list(setting.flags))


def read_ranks(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in _rank_files(folder, ranks)]


def _has_steps(folder: Path, plan: Plan) -> bool:
    """Return True if all ranks have made a step behind the warm-up."""
    return all(file.exists() for file in _rank_files(folder, plan.ranks)) and all(
        len(rank["steps"]) > plan.warm_up for rank in read_ranks(folder, plan.ranks)
    )


def _rank_files(folder: Path, ranks: int) -> list[Path]:
    return [folder / f"rank{rank}.json" for rank in range(ranks)]


def _check_tokens(plan: Plan, setting: Setting, ranks: Sequence[dict[str, Any]]) -> None:
    """Raise if the trainer did not train exactly the tokens of the job."""
    completions = sum(map(sum, plan.job.completion_tokens))
    prompts = sum(
        prompt * len(group) for prompt, group in zip(plan.job.prompt_tokens, plan.job.completion_tokens, strict=True)
    )
    expected = (prompts + completions, completions)
    # Our engine receives the whole step on every rank; a rank of ms-swift encodes only what its data-parallel rank
    # trains.
    model_parallel = 1 if setting.arm == "ours" else plan.ranks // _data_parallel(setting, plan.ranks)
    trained = [sum(rank[key] for rank in ranks) // model_parallel for key in ("tokens", "completion_tokens")]
    if setting.arm == "ours":
        trained = [total // plan.ranks for total in trained]
    missing = tokens_of_early_ends(plan.job.completion_tokens, plan.job.vocabulary) if plan.job.served else 0.0
    if any(abs(count - wanted) > missing for count, wanted in zip(trained, expected, strict=True)):
        raise SystemExit(
            f"{setting.arm} {setting.name}: trained {trained[0]} tokens, {trained[1]} of them in completions, instead "
            f"of {expected[0]} and {expected[1]}; the trainers did not do the same work"
        )


def tokens_of_early_ends(completions: Sequence[Sequence[int]], vocabulary: int) -> float:
    """Return how many tokens may be missing because a model behind a server ended completions before their length.

    Random weights sample the end as often as any other token. Each end costs at most a whole completion, and their
    number is hardly ever more than four standard deviations above its mean.
    """
    ends = sum(map(sum, completions)) / vocabulary
    return (ends + 4 * math.sqrt(ends)) * max(map(max, completions))


def _data_parallel(setting: Setting, ranks: int) -> int:
    flags = dict(zip(setting.flags, setting.flags[1:], strict=False))
    for flag in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        ranks //= int(flags.get(f"--{flag}", 1))
    return ranks
