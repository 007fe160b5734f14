"""An external plugin: a reward that is the same for all completions of every second prompt."""

from __future__ import annotations

from typing import Any

from swift.rewards import ORM, orms


class EverySecond(ORM):
    def __call__(self, completions: list[str], messages: list[Any], **kwargs: Any) -> list[float]:
        numbers = [int(turns[0]["content"].split(":")[0]) for turns in messages]
        return [1.0 if n % 2 else len(text) / 24 for n, text in zip(numbers, completions, strict=True)]


orms["every_second"] = EverySecond
