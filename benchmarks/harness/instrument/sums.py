"""External plugin of `megatron rlhf` for benchmarks.long_run: the reward of sums, and torch's memory in every log."""

from __future__ import annotations

import re
from typing import Any

import torch
from swift.megatron.callbacks import MegatronCallback, megatron_callbacks_map
from swift.rewards import ORM, orms

GIB = 2**30


class Sum(ORM):
    """1 if the last number of a completion is the solution."""

    def __call__(self, completions: list[str], solution: list[str], **columns: Any) -> list[float]:
        numbers = [re.findall(r"-?\d+", text) for text in completions]
        return [float(found[-1:] == [right]) for found, right in zip(numbers, solution, strict=True)]


class TorchMemory(MegatronCallback):
    def on_log(self, logs: dict[str, Any]) -> None:
        """Add what torch holds now; callbacks that are named on the command line come before the one that writes."""
        logs["memory/torch_allocated"] = torch.cuda.memory_allocated() / GIB
        logs["memory/torch_reserved"] = torch.cuda.memory_reserved() / GIB


orms["sum"] = Sum
megatron_callbacks_map["torch_memory"] = TorchMemory
