"""An external plugin with reward functions that fail on one completion, as users' functions do."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from typing import Any

from swift.rewards import ORM, orms


class Broken(ORM):
    """Correct rewards, except for one completion of its batch."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[Any]:
        rewards: list[Any] = [float(len(text)) for text in completions]
        return self.break_one(rewards)

    def break_one(self, rewards: list[Any]) -> list[Any]:
        raise NotImplementedError


class Raises(Broken):
    def break_one(self, rewards: list[Any]) -> list[Any]:
        raise KeyError("solution")


class RaisesOnce(ORM):
    """Raises on the first batch of rank 0; another call on this batch would return rewards."""

    raises = os.environ.get("RANK") == "0"

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        if self.raises:
            self.raises = False
            raise KeyError("solution")
        return [float(len(text)) for text in completions]


class PrintsMegabytes(ORM):
    """Correct rewards, with 4 MB on each of both outputs."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        for stream in (sys.stdout, sys.stderr):
            for _ in range(64):
                print("x" * 2**16, file=stream)
        return [float(len(text)) for text in completions]


class ReturnsNaN(Broken):
    def break_one(self, rewards: list[Any]) -> list[Any]:
        return [math.nan, *rewards[1:]]


class Exits(ORM):
    """Ends the process in a task of its own, which ends an event loop at once."""

    async def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return await asyncio.gather(*map(self._reward, completions))

    async def _reward(self, text: str) -> float:
        sys.exit("no solution")


class ExitsAtOnce(Broken):
    def break_one(self, rewards: list[Any]) -> list[Any]:
        os._exit(3)


orms.update(
    raises=Raises,
    raises_once=RaisesOnce,
    prints_megabytes=PrintsMegabytes,
    returns_nan=ReturnsNaN,
    exits=Exits,
    exits_at_once=ExitsAtOnce,
)
