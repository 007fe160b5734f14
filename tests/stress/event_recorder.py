"""External plugin for a trainer under test: records when each phase begins and which completions each step trains.

STRESS_EVENTS is the file that it appends to, one line of JSON for each event. STRESS_TRANSFER_SECONDS is a pause in the
middle of every weight transfer: that of a tiny model would be over before a kill could hit it. No number changes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from swift_megatron_grpo.deadlines.watchdog import Watchdog
from swift_megatron_grpo.generation.remote.weight_sender import WeightConnection
from swift_megatron_grpo.training.engine import MegatronEngine
from swift_megatron_grpo.types import Sample
from tests.stress.processes import EVENTS_VARIABLE, TRANSFER_VARIABLE, digest

TRANSFER_SECONDS = float(os.environ.get(TRANSFER_VARIABLE, "0"))
original_phase, original_train_step, original_finish = (
    Watchdog.phase,
    MegatronEngine.train_step,
    WeightConnection.finish,
)


def record(**event: object) -> None:
    """Append an event to the file; only rank 0 writes."""
    if torch.distributed.get_rank() == 0:
        with open(os.environ[EVENTS_VARIABLE], "a") as file:
            file.write(json.dumps({"at": time.time(), **event}) + "\n")


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


def slow_finish(self: WeightConnection, end: dict[str, Any]) -> Exception | None:
    record(phase="weight transfer")
    time.sleep(TRANSFER_SECONDS)
    failure = original_finish(self, end)
    record(phase="weight_sync")
    return failure


Watchdog.phase = recorded_phase  # type: ignore[method-assign]
MegatronEngine.train_step = recorded_train_step  # type: ignore[method-assign]
WeightConnection.finish = slow_finish  # type: ignore[method-assign]
