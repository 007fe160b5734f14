"""Reward for naming the colour of an image, for tiny byte-level models."""

from __future__ import annotations

from typing import Any

from swift.rewards import ORM, orms


class Colours(ORM):
    """The share of a completion's characters that are the first letter of the colour."""

    def __call__(self, completions: list[str], colour: list[str], **columns: Any) -> list[float]:
        return [text.count(name[0]) / max(len(text), 1) for text, name in zip(completions, colour, strict=True)]


orms["colours"] = Colours
