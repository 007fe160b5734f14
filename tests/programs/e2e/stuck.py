"""An external plugin that hangs on rank 1: in reward functions `sleeps` and `awaits`; with STUCK=train in training."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from typing import Any

import torch
from swift.rewards import ORM, AsyncORM, orms

from swift_megatron_grpo.training.engine import MegatronEngine


def stuck() -> bool:
    return torch.distributed.get_rank() == 1


class Sleeps(ORM):
    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        with suppress(Exception):  # as reward functions do around every completion
            time.sleep(3600 if stuck() else 0)
        return [float(len(text)) for text in completions]


class Awaits(AsyncORM):
    async def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        await asyncio.sleep(3600 if stuck() else 0)
        return [float(len(text)) for text in completions]


orms.update(sleeps=Sleeps, awaits=Awaits)

if os.environ.get("STUCK") == "train":
    sum_metrics = MegatronEngine._sum_metrics

    def get_stuck(self: Any, shares: Any) -> dict[str, float]:
        if self.steps_done == 1 and stuck():
            time.sleep(3600)
        return sum_metrics(self, shares)

    MegatronEngine._sum_metrics = get_stuck  # type: ignore[method-assign]
