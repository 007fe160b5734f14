"""Rewards -> advantages. Pure, in fp64, on plain floats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swift_megatron_grpo.config import ScaleRewards  # needs torch

_EPSILON = 1e-4  # ms-swift's
_LARGEST = 3.4028234663852886e38  # what fp32, in which ms-swift holds rewards, does not call infinite


def usable(reward: float) -> bool:
    """A number to compute with: neither NaN nor infinite."""
    return abs(reward) <= _LARGEST


def total_reward(rewards: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Weighted sum over the functions that apply. None if none applies, or if one said NaN or infinity."""
    applying = [(reward, weight) for reward, weight in zip(rewards, weights, strict=True) if reward is not None]
    if not applying or not all(usable(reward) for reward, _ in applying):
        return None
    total = sum(reward * weight for reward, weight in applying)
    return total if usable(total) else None


def group_advantages(rewards: Sequence[float | None], num_generations: int, scale: ScaleRewards) -> list[float]:
    """GRPO, https://arxiv.org/abs/2402.03300, eq. 4.1.2:  A = (r - mean of the group) / (std + 1e-4).

    Groups are consecutive. std is that of the group ("group"), of all rewards ("batch"), or 1 without the 1e-4 ("none",
    https://arxiv.org/abs/2503.20783). A reward of None is left out of every mean and std and gets advantage 0; so does
    a completion whose group has no other reward to compare with.
    """
    if len(rewards) % num_generations:
        raise ValueError(f"{len(rewards)} rewards are no whole number of groups of {num_generations}")
    everywhere = standard_deviation(valid(rewards))
    advantages: list[float] = []
    for start in range(0, len(rewards), num_generations):
        group = rewards[start : start + num_generations]
        spread = standard_deviation(valid(group)) if scale == "group" else everywhere
        advantages += _advantages_of_group(group, None if scale == "none" else spread)
    return advantages


def _advantages_of_group(group: Sequence[float | None], spread: float | None) -> list[float]:
    known = valid(group)
    if len(known) < 2:
        return [0.0] * len(group)
    centre = mean(known)
    divisor = 1.0 if spread is None else spread + _EPSILON
    return [0.0 if reward is None else (reward - centre) / divisor for reward in group]


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
