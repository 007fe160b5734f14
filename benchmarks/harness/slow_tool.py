"""The seconds that a slow tool takes, such as one on another machine."""

from __future__ import annotations

import random

SHORTEST, LONGEST = 0.05, 1.0  # seconds, whose logarithm is uniform


def seconds_of(call: str) -> float:
    """Return the seconds of a call, which are the same each time."""
    return float(SHORTEST * (LONGEST / SHORTEST) ** random.Random(call).random())
