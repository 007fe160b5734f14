"""Mean and standard deviation of rewards, in fp64. Rewards of None are excluded."""

from __future__ import annotations

import math
from collections.abc import Sequence

_LARGEST = 3.4028234663852886e38  # the largest finite fp32 value; ms-swift stores rewards in fp32


def usable(reward: float) -> bool:
    """Return True if the reward is neither NaN nor infinite in fp32."""
    return abs(reward) <= _LARGEST


def valid(rewards: Sequence[float | None]) -> list[float]:
    return [reward for reward in rewards if reward is not None]


def mean(values: Sequence[float]) -> float:
    """Return the mean: exactly the common value if all are equal, which a rounded sum does not guarantee."""
    if min(values) == max(values):
        return float(values[0])
    return math.fsum(values) / len(values)


def standard_deviation(values: Sequence[float]) -> float:
    """Return the standard deviation with Bessel's correction; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return math.hypot(*(value - centre for value in values)) / math.sqrt(len(values) - 1)
