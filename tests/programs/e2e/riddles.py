"""An external plugin: an environment that draws its questions from a generator seeded with the conversation's uuid.

It therefore asks the same questions, and as many, in the trainer and on a server. It reads a column of the dataset and
appends the uuid to the file RIDDLES_CLOSED when it is closed. A prompt with WAIT makes it wait indefinitely.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

from swift.rollout.gym_env import Env, envs

WAIT = "Wait!"


class Riddles(Env):
    def __init__(self, env_config: dict[str, Any]) -> None:
        super().__init__(env_config)
        self._name = ""

    async def reset(self, config: Any) -> tuple[str, dict[str, Any], str]:
        self._name = config.uuid
        self._random = random.Random(f"riddle {config.uuid}")
        self._letters = config.data_dict["letters"]
        self._turns = self._random.randint(1, 5)  # may be more than --max_turns allows
        self._waits = WAIT in config.messages[-1]["content"]
        return f"{config.messages[-1]['content']} {self._question()}", {}, ""

    async def step(self, action: list[dict[str, Any]]) -> tuple[str, float, bool, dict[str, Any]]:
        if self._waits:
            await asyncio.Event().wait()
        answer: str = action[-1]["content"]
        reward = sum(character in self._wanted for character in answer) / max(len(answer), 1)
        self._turns -= 1
        return self._question(), reward, self._turns == 0, {}

    async def close(self) -> None:
        if "RIDDLES_CLOSED" in os.environ:
            with Path(os.environ["RIDDLES_CLOSED"]).open("a") as file:
                file.write(f"{self._name}\n")

    def _question(self) -> str:
        self._wanted = self._random.sample(self._letters, k=8)
        return f"Use {''.join(self._wanted)}."


envs["riddles"] = Riddles
