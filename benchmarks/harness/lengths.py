"""Distributions of token counts."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts.

    `constant:512`, `lognormal:MEDIAN:SIGMA:CAP`, or `outlier:200:20`, where one of all has 20 times 200.
    """

    text: str

    def __post_init__(self) -> None:
        try:
            self.draw(1, random.Random(0))
        except ValueError as error:
            raise ValueError(
                f"lengths {self.text!r}: expected constant:TOKENS, outlier:TOKENS:FACTOR or "
                "lognormal:MEDIAN:SIGMA:CAP, such as lognormal:700:0.9:4096"
            ) from error

    def draw(self, count: int, rng: random.Random) -> list[int]:
        kind, *numbers = self.text.split(":")
        if kind == "constant":
            (tokens,) = map(int, numbers)
            return [tokens] * count
        if kind == "outlier":
            tokens, factor = map(int, numbers)
            return [tokens] * (count - 1) + [tokens * factor]
        if kind == "lognormal":
            median, sigma, cap = map(float, numbers)
            return [max(1, min(int(cap), round(rng.lognormvariate(math.log(median), sigma)))) for _ in range(count)]
        raise ValueError(kind)
