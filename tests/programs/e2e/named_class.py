"""An external plugin: a reward for a completion whose first character names the class of the row.

The code of a character divided by the number of classes leaves the class as its remainder. Half of all tokens of a
byte-level model are characters, so a random policy earns something for every class from the first step.
"""

from __future__ import annotations

from typing import Any

from swift.rewards import ORM, orms


class NamedClass(ORM):
    def __call__(self, completions: list[str], label: list[int], classes: list[int], **columns: Any) -> list[float]:
        return [
            float(text[:1].isascii() and text != "" and ord(text[0]) % number == expected)
            for text, expected, number in zip(completions, label, classes, strict=True)
        ]


orms["named_class"] = NamedClass
