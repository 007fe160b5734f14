"""Environment with a tool: the model writes calc(17 + 23), reads the result in the next turn, and answers.

    --external_plugins reasoning_task.py calculator.py --multi_turn_scheduler gym_scheduler --gym_env calculator \
        --max_turns 3

Rows are those of reasoning_task.py. The reward is the score of the first response without a call, and CALL for
a call with the right result, because a small model seldom calls a tool by itself. A call pays once.
"""

from __future__ import annotations

import json
import re
from typing import Any

from reasoning_task import score
from swift.rollout.gym_env import Env, envs

HINT = "Write calc(...) with the calculation in the parentheses."
CALL = 0.2


class Calculator(Env):
    async def reset(self, config: Any) -> tuple[str, dict[str, Any], str]:
        """Return the question of the row, and how to call the tool."""
        self._problem, self._earns = json.loads(config.data_dict["problem"]), CALL
        return f"{config.messages[-1]['content']} {HINT}", {}, ""

    async def step(self, action: list[dict[str, Any]]) -> tuple[str, float, bool, dict[str, Any]]:
        """Return the result of a call, or the score of an answer."""
        text: str = action[-1]["content"]
        call = re.search(r"calc\((.*)\)", text)
        if call:
            result = calculate(call[1])
            reward = self._earns if score(result, self._problem) >= 1 else 0.0
            self._earns -= reward
            return f"The result is {result}. Answer with the number only.", reward, False, {}
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
