"""One trainer under a fault: its processes, its events, and what became of its completions."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from swift_megatron_grpo.output.checkpoints.manifest import has_manifest
from tests.forking.client import OFFLINE, ForkedProcess, fork_server
from tests.stress.processes import EVENT_RECORDER, EVENTS_VARIABLE, digest, rank_file
from tests.support.runs import REWARDS, environment_of_processes, grpo_flags

RANKS = 2
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Inputs:
    """Model, data and folders that all runs of a script share."""

    work: Path
    model: Path
    dataset: Path

    @property
    def folder(self) -> Path:
        return self.work / "disk" / "run"

    @property
    def dump(self) -> Path:
        return self.work / "disk-of-dump" / "dump"


@dataclass
class Run:
    """A trainer of two ranks with its own folder, rollout dump, log and events."""

    folder: Path
    dump: Path
    first: int  # steps of the checkpoint that it continues from
    process: ForkedProcess | subprocess.Popen[str]
    log: Path
    events_file: Path
    seen: set[psutil.Process] = field(default_factory=set)

    @classmethod
    def start(
        cls, inputs: Inputs, name: str, checkpoint: Path | None, flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None, command: bool = False, dump: Path | None = None,
    ) -> Run:  # fmt: skip
        """Start two forked ranks, or with `command` the real command with torchrun."""
        folder, dump = inputs.folder, dump or inputs.dump
        log, events = inputs.work / f"{name}.txt", inputs.work / f"{name}.jsonl"
        all_flags = grpo_flags(inputs.model, inputs.dataset, folder, [
            "--external_plugins", str(REWARDS), str(EVENT_RECORDER), "--rollout_dump", str(dump),
            "--seed_completions", "true", "--torch_dtype", "float32", "--fp16", "false", "--save_steps", "1",
            "--no_save_optim", "false", "--no_save_rng", "false", "--save_total_limit", "3",
            "--train_iters", "1000", *resume_flags(checkpoint), *flags])  # fmt: skip
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
                    "megatron rlhf", all_flags, RANKS, inputs.work, output, variables, kills_ranks=True
                )
        return cls(folder, dump, 0 if checkpoint is None else step_of(checkpoint), process, log, events)

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
        """Return the number of steps that this run has trained, and its phase."""
        events = self.events()
        step = max((event["step"] for event in events if "step" in event), default=0)
        return step, next((event["phase"] for event in reversed(events) if "phase" in event), "start")

    def trained(self) -> dict[int, list[str]]:
        """Return the digests of the completions that each step trained, by the step's number in the whole training."""
        return {self.first + event["step"]: event["trained"] for event in self.events() if "trained" in event}

    def rank(self, number: int) -> psutil.Process:
        return psutil.Process(int(rank_file(self.events_file, number).read_text()))

    def wait_for(self, step: int, phase: str, seconds: float) -> bool:
        """Wait until this phase begins after `step` steps, or later; return False if the run ended before."""

        def reached() -> bool:
            done, current = self.now()
            return done > step or (done == step and current == phase)

        return self.wait_until(reached, seconds) and self.process.poll() is None

    def next_step_after(self, at: float) -> float:
        """Return the time at which the first step after a moment was trained; 0 if there is none so far."""
        return min((event["at"] for event in self.events() if "trained" in event and event["at"] > at), default=0.0)

    def wait_for_step_after(self, at: float, seconds: float) -> bool:
        return self.wait_until(lambda: self.next_step_after(at) > 0, seconds)

    def wait(self, seconds: float) -> bool:
        """Wait until the leading process has ended; return False at the timeout."""
        return self.wait_until(lambda: self.process.poll() is not None, seconds)

    def wait_for_exit(self, seconds: float) -> bool:
        """Wait until every process has ended; return False at the timeout."""
        return self.wait_until(lambda: self.process.poll() is not None and not self.processes(), seconds)

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for a condition, as long as the run has processes; return whether it holds."""
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


def whole_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, the newest last."""
    complete = [path for path in folder.glob("checkpoint-*[0-9]") if has_manifest(path)]
    return sorted(complete, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def resume_flags(checkpoint: Path | None) -> list[str]:
    return [] if checkpoint is None else ["--finetune", "false", "--mcore_model", str(checkpoint)]


@dataclass(frozen=True)
class Completions:
    """Numbers of completions that a run had generated and graded before a fault, by their fate."""

    again: int  # of steps after the checkpoint that the next run continued from: they are generated again
    lost: int  # of earlier steps, and neither trained nor in the dump


def dumped(folder: Path) -> dict[int, list[str]]:
    """Return the digests of all dumped completions, by rollout."""
    rollouts = {}
    for path in sorted(folder.glob("rollout-*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rollouts[int(path.stem.split("-")[1])] = [digest(row["prompt_ids"] + row["completion_ids"]) for row in rows]
    return rollouts


def account(run: Run, continued_from: int, in_dump: Mapping[int, Sequence[str]]) -> Completions:
    """Compare what a run generated with what was trained and dumped. Each step trains one rollout."""
    trained = run.trained()
    again = lost = 0
    for event in run.events():
        if "complete" not in event:
            continue
        rollout, digests = event["rollout"], event["complete"]
        if rollout >= continued_from:
            again += len(digests)
        elif trained.get(rollout + 1) != digests or list(in_dump.get(rollout, [])) != digests:
            lost += len(digests)
    return Completions(again, lost)
