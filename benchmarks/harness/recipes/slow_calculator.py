"""External plugin: the calculator of templates/plugins, which takes as long to answer as a tool on another machine."""

from __future__ import annotations

import asyncio
from typing import Any

from calculator import Calculator
from swift.rollout.gym_env import envs

from benchmarks.harness.slow_tool import seconds_of


class SlowCalculator(Calculator):
    async def step(self, action: list[dict[str, Any]]) -> tuple[str, float, bool, dict[str, Any]]:
        result: tuple[str, float, bool, dict[str, Any]] = await super().step(action)
        is_done = result[2]
        if not is_done:  # a call
            await asyncio.sleep(seconds_of(str(action)))
        return result


envs["calculator"] = SlowCalculator
