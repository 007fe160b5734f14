"""External plugin of all runs: rewards without meaning, an environment with a tool, and one run at a time on a GPU.

Trainers of other checkouts load it as well, so it imports nothing that they lack.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import zlib
from typing import Any, TextIO

import torch
from swift.rewards import ORM, orms
from swift.rollout.gym_env import Env, envs

from benchmarks.harness.free_gpus import wait_until_free
from benchmarks.harness.processes import LOCKS, visible_devices
from benchmarks.harness.slow_tool import seconds_of

QUESTIONS = ("Add 7 to the result.", "Subtract 12 from that.", "Explain the last step.", "Multiply that by 3.")


class Drawn(ORM):
    """A number that differs between completions, or is the same for all completions of a uniform prompt."""

    def __call__(self, completions: list[str], uniform: list[bool], **columns: Any) -> list[float]:
        scores = [zlib.crc32(text.encode()) / 2**32 for text in completions]
        return [0.5 if same else score for same, score in zip(uniform, scores, strict=True)]


class Answers(Env):
    """A tool that answers every turn, so that each conversation has --max_turns."""

    def seconds_of(self, call: str) -> float:
        return 0.0

    async def reset(self, config: Any) -> tuple[str, dict[str, Any], str]:
        self._name, self._turns = config.uuid, 0
        return config.messages[-1]["content"], {}, ""

    async def step(self, action: list[dict[str, Any]]) -> tuple[str, float, bool, dict[str, Any]]:
        self._turns += 1
        await asyncio.sleep(self.seconds_of(f"{self._name}/{self._turns}"))
        return QUESTIONS[self._turns % len(QUESTIONS)], 0.0, False, {}

    async def close(self) -> None: ...


class AnswersSlowly(Answers):
    def seconds_of(self, call: str) -> float:
        return seconds_of(call)


def hold_gpus() -> list[TextIO]:
    """Wait until no other run uses the GPUs of this process; what is returned holds them until the process ends.

    Runs that start side by side import their packages meanwhile.
    """
    held: list[TextIO] = []
    for device in visible_devices():
        held.append((LOCKS / f"swift_megatron_grpo_benchmark_{device}.lock").open("w"))
        fcntl.flock(held[-1], fcntl.LOCK_EX)
    if torch.cuda.is_available():
        wait_until_free(visible_devices())
    return held


orms["drawn"] = Drawn
envs.update(answers=Answers, answers_slowly=AnswersSlowly)
HELD = hold_gpus() if os.environ.get("LOCAL_RANK") else []
