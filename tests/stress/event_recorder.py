"""External plugin for a trainer under test: records phases, finished rollouts, and what each step trains.

STRESS_EVENTS is the file that it appends to, one line of JSON for each event; every rank also writes its process id
next to it. STRESS_TRANSFER_SECONDS is a pause in the middle of every weight transfer: that of a tiny model would be
over before a kill could hit it. STRESS_OPEN_FILES is the limit on open files of each rank. No number changes.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from swift_megatron_grpo.generation.remote.weight_sender import WeightConnection
from swift_megatron_grpo.output.checkpoints.saving import CheckpointWriter
from swift_megatron_grpo.output.recording.folder import RolloutDump
from swift_megatron_grpo.runtime.deadlines.watchdog import Watchdog
from swift_megatron_grpo.training.engine import MegatronEngine
from swift_megatron_grpo.types import Graded, Sample
from tests.stress.processes import EVENTS_VARIABLE, OPEN_FILES_VARIABLE, TRANSFER_VARIABLE, digest, rank_file

TRANSFER_SECONDS = float(os.environ.get(TRANSFER_VARIABLE, "0"))
original_phase, original_train_step, original_finish, original_writing, original_dump = (
    Watchdog.phase,
    MegatronEngine.train_step,
    WeightConnection.finish,
    CheckpointWriter.writing,
    RolloutDump.write,
)


def append(**event: object) -> None:
    """Append an event to the file."""
    with open(os.environ[EVENTS_VARIABLE], "a") as file:
        file.write(json.dumps({"at": time.time(), **event}) + "\n")


def record(**event: object) -> None:
    """Append an event on rank 0 only."""
    if torch.distributed.get_rank() == 0:
        append(**event)


@contextmanager
def recorded_phase(self: Watchdog, name: str) -> Iterator[None]:
    record(phase=name)
    with original_phase(self, name):
        yield
    record(phase="between phases")


def recorded_train_step(self: MegatronEngine, samples: Sequence[Sample], *args: Any, **kwargs: Any) -> dict[str, float]:
    metrics = original_train_step(self, samples, *args, **kwargs)
    record(step=self.steps_done, trained=[digest(sample.tokens) for sample in samples])
    return metrics


@contextmanager
def recorded_writing(self: CheckpointWriter, *args: Any, **kwargs: Any) -> Iterator[None]:
    record(phase="saving")
    with original_writing(self, *args, **kwargs):
        yield


def recorded_dump(self: RolloutDump, rollout: int, draw: int, graded: Sequence[Graded]) -> None:
    """Record every rollout that is complete, generated and graded, before it is written."""
    if self._writes_here:
        tokens = [[*completion.rollout.prompt_ids, *completion.rollout.completion_ids] for completion in graded]
        append(phase="dump", rollout=rollout, complete=[digest(ids) for ids in tokens])
    original_dump(self, rollout, draw, graded)


def slow_finish(self: WeightConnection, end: dict[str, Any]) -> Exception | None:
    record(phase="weight transfer")
    time.sleep(TRANSFER_SECONDS)
    failure = original_finish(self, end)
    record(phase="weight_sync")
    return failure


Watchdog.phase = recorded_phase  # type: ignore[method-assign]
MegatronEngine.train_step = recorded_train_step  # type: ignore[method-assign]
WeightConnection.finish = slow_finish  # type: ignore[method-assign]
CheckpointWriter.writing = recorded_writing  # type: ignore[method-assign]
RolloutDump.write = recorded_dump  # type: ignore[method-assign]

rank_file(os.environ[EVENTS_VARIABLE], int(os.environ.get("RANK", "0"))).write_text(str(os.getpid()))
if OPEN_FILES_VARIABLE in os.environ:
    limit = int(os.environ[OPEN_FILES_VARIABLE])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
