"""Environment with a tool: the model writes calc(17 + 23), reads the result in the next turn, and answers.

    --external_plugins reasoning_task.py calculator.py --multi_turn_scheduler gym_scheduler --gym_env calculator \
        --max_turns 3

Rows are those of reasoning_task.py. The reward is the score of the first response without a call.
"""

from __future__ import annotations

import json
import re
from typing import Any

from reasoning_task import score
from swift.rollout.gym_env import Env, envs

HINT = "Write calc(...) with the calculation in the parentheses."


class Calculator(Env):
    async def reset(self, config: Any) -> tuple[str, dict[str, Any], str]:
        """Return the question of the row, and how to call the tool."""
        self._problem = json.loads(config.data_dict["problem"])
        return f"{config.messages[-1]['content']} {HINT}", {}, ""

    async def step(self, action: list[dict[str, Any]]) -> tuple[str, float, bool, dict[str, Any]]:
        """Return the result of a call, or the score of an answer."""
        text: str = action[-1]["content"]
        call = re.search(r"calc\((.*)\)", text)
        if call:
            return f"The result is {calculate(call[1])}. Answer with the number only.", 0.0, False, {}
        return "", score(text, self._problem), True, {}

    async def close(self) -> None: ...


def calculate(expression: str) -> str:
    """Return the value of an expression of numbers and + - * / ( ), or what is wrong with it."""
    if not re.fullmatch(r"[-+*/(). 0-9]{1,80}", expression) or "**" in expression:
        return "unknown: use numbers and + - * / ( )"
    try:
        return f"{eval(expression):.12g}"
    except (ArithmeticError, SyntaxError, TypeError) as error:
        return f"unknown: {error}"


envs["calculator"] = Calculator
