"""A judge that grades completions from 0 to 10, by a chat model behind any server with OpenAI's routes.

    --external_plugins templates/plugins/helpful_judge.py \\
        --reward_model http://HOST:8001/v1/chat/completions --reward_model_plugin helpful

Use it as a pattern: `request` makes the body of a request from a row of the dataset, whose last message is the
completion, and `score` reads the answer.
"""

from __future__ import annotations

import re
from typing import Any

from swift.rewards import rm_plugins

TASK = """Grade the last answer of this conversation: is it correct, complete and relevant? Think briefly.
End with a line `Grade: N`, where N is a number from 0 (useless) to 10 (perfect).

"""


class HelpfulJudge:
    def request(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """Return the body of a request; None would mean that the judge does not apply to this completion."""
        conversation = "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in row["messages"])
        content = [{"role": "user", "content": TASK + conversation}]
        return {"messages": content, "temperature": 0, "max_tokens": 512}

    def score(self, text: str) -> float | None:
        """Return the grade, from 0 to 1; None for an answer without one: then --bad_reward decides."""
        grades = re.findall(r"Grade:\s*(10|[0-9])\b", text)
        return int(grades[-1]) / 10 if grades else None


rm_plugins["helpful"] = HelpfulJudge
