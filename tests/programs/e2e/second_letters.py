"""A reward plugin: the share of letters that come two places after the one before them in the alphabet."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from swift.rewards import ORM, orms


class SecondLetters(ORM):
    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return [sum((ord(b) - ord(a)) % 26 == 2 for a, b in pairwise(text)) / max(1, len(text)) for text in completions]


orms["second_letters"] = SecondLetters
