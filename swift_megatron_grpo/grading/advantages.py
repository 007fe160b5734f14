"""Rewards -> advantages. Pure, in fp64, on plain floats.

Groups are consecutive. A reward of None (see `--bad_reward`) is left out of every mean and spread and gets advantage 0;
so does a completion that has no other to be compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from swift_megatron_grpo.grading.statistics import mean, standard_deviation, usable, valid

if TYPE_CHECKING:
    from swift_megatron_grpo.config import Estimator, ScaleRewards  # needs torch

_EPSILON = 1e-4  # ms-swift's
_GDPO_EPSILON = 1e-8  # ms-swift's
Rewards = Sequence[float | None]


def total_reward(rewards: Rewards, weights: Sequence[float]) -> float | None:
    """Weighted sum over the functions that apply. None if none applies, or if one said NaN or infinity."""
    applying = [(reward, weight) for reward, weight in zip(rewards, weights, strict=True) if reward is not None]
    if not applying or not all(usable(reward) for reward, _ in applying):
        return None
    total = sum(reward * weight for reward, weight in applying)
    return total if usable(total) else None


def group_advantages(
    rewards: Rewards, num_generations: int, scale: ScaleRewards, estimator: Estimator = "grpo"
) -> list[float]:
    """What is left of a reward after its baseline, divided by a spread + 1e-4.

    estimator                  baseline                              paper
    grpo                       mean of the group                     https://arxiv.org/abs/2402.03300
    rloo                       mean of the others of the group       https://arxiv.org/abs/2402.14740
    reinforce_plus_plus        mean of the group                     https://arxiv.org/abs/2501.03262, "-baseline"
    reinforce_plus_plus_plain  mean of all rewards, so one           https://arxiv.org/abs/2501.03262
                               completion a prompt is enough

    scale                      spread, the standard deviation of
    group                      the group's rewards
    batch                      all rewards; for reinforce_plus_plus, of what is left of all rewards
    none                       1, without the 1e-4: https://arxiv.org/abs/2503.20783
    """
    if len(rewards) % num_generations:
        raise ValueError(f"{len(rewards)} rewards are no whole number of groups of {num_generations}")
    groups = [rewards[start : start + num_generations] for start in range(0, len(rewards), num_generations)]
    if estimator == "reinforce_plus_plus_plain":
        left = _minus_mean(rewards)
    else:
        left = [each for group in groups for each in (_minus_others if estimator == "rloo" else _minus_mean)(group)]

    if scale == "none":
        return [each or 0.0 for each in left]
    if scale == "group":
        spreads = [spread for group in groups for spread in [standard_deviation(valid(group))] * len(group)]
    else:
        of_what = left if estimator == "reinforce_plus_plus" else rewards
        spreads = [standard_deviation(valid(of_what))] * len(rewards)
    return [0.0 if each is None else each / (spread + _EPSILON) for each, spread in zip(left, spreads, strict=True)]


def _minus_mean(rewards: Rewards) -> list[float | None]:
    known = valid(rewards)
    if len(known) < 2:
        return [None] * len(rewards)
    centre = mean(known)
    return [None if reward is None else reward - centre for reward in rewards]


def _minus_others(rewards: Rewards) -> list[float | None]:
    """r - (sum - r) / (n - 1) is n / (n - 1) times r - mean."""
    count = len(valid(rewards))
    return [None if each is None else each * count / (count - 1) for each in _minus_mean(rewards)]


def gdpo_advantages(
    scores: Sequence[Rewards], rewards: Rewards, weights: Sequence[float], num_generations: int
) -> list[float]:
    """GDPO, https://arxiv.org/abs/2601.05242: every reward function is normalised within the group by itself, so that
    one with large values does not drown the others; the weighted sum is normalised over the batch.

    scores: [completion][function]. A completion whose total reward is None takes no part. A function that does not
    apply to a completion, or to fewer than two of a group, contributes 0.
    """
    sums = [0.0 if reward is not None else None for reward in rewards]
    for start in range(0, len(rewards), num_generations):
        group = range(start, start + num_generations)
        for function, weight in enumerate(weights):
            column = [scores[i][function] if rewards[i] is not None else None for i in group]
            spread = standard_deviation(valid(column)) + _GDPO_EPSILON
            for i, left in zip(group, _minus_mean(column), strict=True):
                so_far = sums[i]
                if left is not None and so_far is not None:
                    sums[i] = so_far + weight * left / spread
    known = valid(sums)
    if len(known) < 2:
        return [0.0] * len(rewards)
    centre, spread = mean(known), standard_deviation(known) + _GDPO_EPSILON
    return [0.0 if each is None else (each - centre) / spread for each in sums]
