"""An external plugin of a trainer under trial: which phase of which step begins when, and what each step trains.

WITNESS is the file that it writes, one line of JSON for each event. WITNESS_TRANSFER, in seconds, is how long a
transfer of weights is held up in its middle: a tiny model's would be over before anybody could disturb it. No number
changes.
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
from tests.stress.survival.processes import digest

SECONDS_OF_TRANSFER = float(os.environ.get("WITNESS_TRANSFER", "0"))
in_phase, train_step, finish = Watchdog.phase, MegatronEngine.train_step, WeightConnection.finish


def note(**event: object) -> None:
    """Rank 0 alone."""
    if torch.distributed.get_rank() == 0:
        with open(os.environ["WITNESS"], "a") as file:
            file.write(json.dumps({"at": time.time(), **event}) + "\n")


@contextmanager
def phase(self: Watchdog, name: str) -> Iterator[None]:
    note(phase=name)
    with in_phase(self, name):
        yield
    note(phase="between phases")


def noted_train_step(self: MegatronEngine, samples: Sequence[Sample], *args: Any, **kwargs: Any) -> dict[str, float]:
    metrics = train_step(self, samples, *args, **kwargs)
    note(step=self.steps_done, trained=[digest(sample.tokens) for sample in samples])
    return metrics


def slow_finish(self: WeightConnection, end: dict[str, Any]) -> Exception | None:
    note(phase="weights on their way")
    time.sleep(SECONDS_OF_TRANSFER)
    failure = finish(self, end)
    note(phase="weight_sync")
    return failure


Watchdog.phase = phase  # type: ignore[method-assign]
MegatronEngine.train_step = noted_train_step  # type: ignore[method-assign]
WeightConnection.finish = slow_finish  # type: ignore[method-assign]
