"""One trainer under a fault: its processes, its events, and what became of its completions."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from swift_megatron_grpo.checkpoints.manifest import has_manifest, read_manifest
from tests.e2e.runs import REWARDS, environment_of_processes, grpo_flags
from tests.forking.client import OFFLINE, ForkedProcess, fork_server
from tests.stress.processes import EVENT_RECORDER, EVENTS_VARIABLE, digest, rank_file

RANKS = 2
EXIT_SECONDS = 40.0  # for the processes of a run to be gone once it has failed: an error has 30 s
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Inputs:
    """What all runs of a script share."""

    work: Path
    model: Path
    dataset: Path


@dataclass
class Run:
    """A trainer of two ranks with its own folder, rollout dump, log and events."""

    folder: Path
    dump: Path
    process: ForkedProcess | subprocess.Popen[str]
    log: Path
    events_file: Path
    seen: set[psutil.Process] = field(default_factory=set)

    @classmethod
    def start(
        cls, inputs: Inputs, folder: Path, dump: Path, name: str, flags: Sequence[str],
        environment: Mapping[str, str] | None = None, command: bool = False,
    ) -> Run:  # fmt: skip
        """Start two forked ranks, or with `command` the real command with torchrun."""
        log, events = inputs.work / f"{name}.txt", inputs.work / f"{name}.jsonl"
        all_flags = grpo_flags(inputs.model, inputs.dataset, folder, [
            "--external_plugins", str(REWARDS), str(EVENT_RECORDER), "--rollout_dump", str(dump),
            "--seed_completions", "true", "--torch_dtype", "float32", "--fp16", "false", "--save_steps", "1",
            "--no_save_optim", "false", "--no_save_rng", "false", "--save_total_limit", "3", *flags])  # fmt: skip
        variables = {EVENTS_VARIABLE: str(events), **OFFLINE, **(environment or {})}
        with log.open("w") as output:
            process: ForkedProcess | subprocess.Popen[str]
            if command:
                program = [str(Path(sys.executable).with_name("megatron")), "rlhf", *all_flags]
                variables = {**environment_of_processes(), "NPROC_PER_NODE": str(RANKS),
                             "MASTER_PORT": str(random.SystemRandom().randint(20000, 32000)), **variables}  # fmt: skip
                process = subprocess.Popen(program, env=variables, text=True, cwd=inputs.work, stdout=output,
                                           stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
            else:
                process = fork_server("trainer").start(
                    "megatron rlhf", all_flags, RANKS, inputs.work, output, variables
                )
        return cls(folder, dump, process, log, events)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """Return the events recorded so far, without a line that is being written or was cut off."""
        events: list[dict[str, Any]] = []
        for line in self.events_file.read_text().splitlines() if self.events_file.exists() else []:
            with suppress(json.JSONDecodeError):
                events.append(json.loads(line))
        return events

    def now(self) -> tuple[int, str]:
        """Return the number of steps trained and the current phase."""
        events = self.events()
        step = max((event["step"] for event in events if "step" in event), default=0)
        return step, next((event["phase"] for event in reversed(events) if "phase" in event), "start")

    def rank(self, number: int) -> psutil.Process:
        return psutil.Process(int(rank_file(self.events_file, number).read_text()))

    def wait_for(self, step: int, phase: str, seconds: float) -> bool:
        """Wait until this phase begins after `step` steps, or later; return False if the run ended before."""

        def reached() -> bool:
            done, current = self.now()
            return done > step or (done == step and current == phase)

        return self._wait(reached, seconds) and self.process.poll() is None

    def wait(self, seconds: float) -> bool:
        """Wait until the leading process has ended; return False at the timeout."""
        return self._wait(lambda: self.process.poll() is not None, seconds)

    def wait_for_exit(self, seconds: float) -> bool:
        """Wait until every process has ended; return False at the timeout."""
        return self._wait(lambda: self.process.poll() is not None and not self.processes(), seconds)

    def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or (self.process.poll() is not None and not self.processes()):
                return condition()
            time.sleep(POLL_SECONDS)
        return True

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the run that still exist, including orphans."""
        with suppress(psutil.NoSuchProcess):
            self.seen.update(psutil.Process(self.process.pid).children(recursive=True))
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(process.pid) == self.process.pid:
                    self.seen.add(process)
        return [process for process in self.seen if is_alive(process) and process.pid != self.process.pid]

    def kill(self) -> int:
        """Send SIGKILL to what is left, and return the number of processes."""
        left = self.processes()
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(60)
        return len(left)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint."""
    complete = [path for path in folder.glob("checkpoint-*[0-9]") if has_manifest(path)]
    return max(complete, key=lambda path: int(path.name.split("-")[1]), default=None)


def resume_flags(checkpoint: Path | None) -> list[str]:
    """Return the flags of a run that continues for two steps and saves once."""
    step = 0 if checkpoint is None else read_manifest(checkpoint).step
    source = [] if checkpoint is None else ["--finetune", "false", "--mcore_model", str(checkpoint)]
    return [*source, "--train_iters", str(step + 2), "--save_steps", "100"]


@dataclass(frozen=True)
class Completions:
    """What became of the completions of a run, after the run that continued it, if there was one."""

    lost: int  # complete before the fault, neither trained nor in the dump now, and not of the step in flight
    again: int  # of the step in flight: complete before the fault, generated again by the resumed run
    trained: int  # in all steps that count
    problem: str = ""  # how dump and training differ, if they do


def account(runs: Sequence[tuple[Run, int]]) -> Completions:
    """Compare what was generated, trained and dumped. `runs`: each with the steps of the checkpoint it began from.

    Each step trains one rollout, so rollout N belongs to step N + 1. The steps that count are those of the last run and
    those before its checkpoint.
    """
    trained = dict[int, list[str]]()
    for run, first in runs:
        trained = {step: digests for step, digests in trained.items() if step <= first}
        trained |= {event["step"]: event["trained"] for event in run.events() if "trained" in event}
    dumped = {}
    for path in sorted(runs[-1][0].dump.glob("rollout-*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        dumped[int(path.stem.split("-")[1])] = [digest(row["prompt_ids"] + row["completion_ids"]) for row in rows]
    disturbed = runs[0][0]
    in_flight = runs[-1][1] if len(runs) > 1 else None  # the rollout that the resumed run begins with
    lost = again = 0
    for event in disturbed.events():
        if "complete" not in event:
            continue
        rollout = event["rollout"]
        kept = Counter([*dumped.get(rollout, []), *trained.get(rollout + 1, [])])
        if rollout == in_flight:
            again += len(event["complete"])
        elif in_flight is not None and rollout > in_flight:
            lost += len(event["complete"])
        else:
            lost += sum(completion not in kept for completion in event["complete"])
    return Completions(lost, again, sum(map(len, trained.values())), _difference(trained, dumped))


def _difference(trained: Mapping[int, Sequence[str]], dumped: Mapping[int, Sequence[str]]) -> str:
    if sorted(trained) != list(range(1, len(trained) + 1)):
        return f"the trained steps are {sorted(trained)}"
    for step, digests in trained.items():
        if list(dumped.get(step - 1, [])) != list(digests):
            return f"step {step} did not train the completions of rollout {step - 1} in the dump"
    return ""
