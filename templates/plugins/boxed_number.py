r"""ms-swift's reward `accuracy` for answers that are numbers.

`accuracy` evaluates what is in the box: where 5 is right, so is \boxed{7 + 4 - 6}, and a policy can copy the question
into the box. Here `accuracy` sees only a number.
"""

import re
from typing import Any

from swift.rewards import ORM, orms


class BoxedNumber(ORM):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._accuracy = orms["accuracy"](*args, **kwargs)

    def __call__(self, completions: list[str], solution: list[str], **columns: Any) -> list[float]:
        right: list[float] = self._accuracy([boxed(text) for text in completions], solution)
        return right


def boxed(text: str) -> str:
    """Return the only box of a text if it holds a number, and nothing otherwise."""
    boxes = re.findall(r"\\boxed\b(?:\{-?\d+(?:\.\d+)?\})?", text)
    return boxes[0] if len(boxes) == 1 and boxes[0].endswith("}") else ""


orms["boxed_number"] = BoxedNumber
