"""Means and spreads of rewards, in fp64, of what is there: None is left out."""

from __future__ import annotations

import math
from collections.abc import Sequence

_LARGEST = 3.4028234663852886e38  # what fp32, in which ms-swift holds rewards, does not call infinite


def usable(reward: float) -> bool:
    """A number to compute with: neither NaN nor infinite."""
    return abs(reward) <= _LARGEST


def valid(rewards: Sequence[float | None]) -> list[float]:
    return [reward for reward in rewards if reward is not None]


def mean(values: Sequence[float]) -> float:
    """Exactly the value itself when all are equal, which a rounded sum does not promise."""
    if min(values) == max(values):
        return float(values[0])
    return math.fsum(values) / len(values)


def standard_deviation(values: Sequence[float]) -> float:
    """With Bessel's correction. Of fewer than two values: 0."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return math.hypot(*(value - centre for value in values)) / math.sqrt(len(values) - 1)
