"""Small environment for multi-turn conversations: every turn requests another letter.

    --external_plugins templates/plugins/spelling.py --multi_turn_scheduler gym_scheduler --gym_env spelling

Use it as a pattern for your own environment: `reset` returns the first question; `step` receives the conversation with
the model's last answer and returns the next question, a reward, and True if the conversation is over. The reward of the
completion is the sum over all turns. The model reads the text of the environment but is not trained on it.
"""

from __future__ import annotations

import random
import string
from typing import Any

from swift.rollout.gym_env import Env, envs

Observation = str
SYSTEM = ""  # no system prompt


class Spelling(Env):
    def __init__(self, env_config: dict[str, Any]) -> None:
        super().__init__(env_config)
        self._turns = env_config.get("turns", 3)
        self._letter = ""

    async def reset(self, config: Any) -> tuple[Observation, dict[str, Any], str]:
        """Return the first question.

        `config` is the request: `messages` come from the dataset, `data_dict` contains the other columns of the row.
        """
        question: str = config.messages[-1]["content"]
        return f"{question} {self._next_question()}", {}, SYSTEM

    async def step(self, action: list[dict[str, Any]]) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Grade the last message of the conversation `action` and return the next question."""
        answer: str = action[-1]["content"]
        reward = answer.count(self._letter) / max(len(answer), 1)
        self._turns -= 1
        return self._next_question(), reward, self._turns == 0, {}

    async def close(self) -> None: ...

    def _next_question(self) -> str:
        self._letter = random.choice(string.ascii_lowercase)
        return f"Use {self._letter}."


envs["spelling"] = Spelling
