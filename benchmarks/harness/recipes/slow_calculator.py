"""External plugin: the calculator of templates/plugins, which takes as long to answer as a tool on another machine."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from calculator import Calculator
from swift.rollout.gym_env import envs

SHORTEST, LONGEST = 0.05, 1.0  # seconds, whose logarithm is uniform


class SlowCalculator(Calculator):
    async def step(self, action: list[dict[str, Any]]) -> tuple[str, float, bool, dict[str, Any]]:
        result: tuple[str, float, bool, dict[str, Any]] = await super().step(action)
        is_done = result[2]
        if not is_done:  # a call
            share = random.Random(str(action)).random()
            await asyncio.sleep(SHORTEST * (LONGEST / SHORTEST) ** share)
        return result


envs["calculator"] = SlowCalculator
