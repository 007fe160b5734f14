"""A small environment, for conversations of several turns: it asks for a letter, and then for another one.

    --external_plugins templates/plugins/spelling.py --multi_turn_scheduler gym_scheduler --gym_env spelling

It is also the shape of an environment of your own: `reset` gives the first question, `step` looks at the last answer
and gives the next question, a reward, and whether it is over. The rewards of all turns, added up, are the completion's
reward; the words of the environment are read by the model and not trained.
"""

from __future__ import annotations

import random
import string
from typing import Any

from swift.rollout.gym_env import Env, envs

Observation = str
SYSTEM = ""  # none


class Spelling(Env):
    def __init__(self, env_config: dict[str, Any]) -> None:
        super().__init__(env_config)
        self._turns = env_config.get("turns", 3)
        self._letter = ""

    async def reset(self, config: Any) -> tuple[Observation, dict[str, Any], str]:
        """`config` is the request: its messages are the dataset's, and data_dict has the row's other columns."""
        question: str = config.messages[-1]["content"]
        return f"{question} {self._ask()}", {}, SYSTEM

    async def step(self, action: list[dict[str, Any]]) -> tuple[Observation, float, bool, dict[str, Any]]:
        """`action` is the conversation so far."""
        answer: str = action[-1]["content"]
        reward = answer.count(self._letter) / max(len(answer), 1)
        self._turns -= 1
        return self._ask(), reward, self._turns == 0, {}

    async def close(self) -> None: ...

    def _ask(self) -> str:
        self._letter = random.choice(string.ascii_lowercase)
        return f"Use {self._letter}."


envs["spelling"] = Spelling
