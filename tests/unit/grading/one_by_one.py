"""Grading one completion after the other in plain Python, with which the arrays are compared bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from swift_megatron_grpo.settings.algorithm import ESTIMATORS
from swift_megatron_grpo.types import AGENT_ERROR, Graded

EPSILON, GDPO_EPSILON, LARGEST, ZERO = 1e-4, 1e-8, 3.4028234663852886e38, 1e-8
Rewards = Sequence[float | None]


def usable(reward: float) -> bool:
    return abs(reward) <= LARGEST


def total_reward(rewards: Rewards, weights: Sequence[float]) -> float | None:
    applying = [(reward, weight) for reward, weight in zip(rewards, weights, strict=True) if reward is not None]
    if not applying or not all(usable(reward) for reward, _ in applying):
        return None
    total = 0.0
    for reward, weight in applying:  # not `sum`, which Python 3.12 rounds once
        total += reward * weight
    return total if usable(total) else None


def valid(rewards: Rewards) -> list[float]:
    return [reward for reward in rewards if reward is not None]


def mean(values: Sequence[float]) -> float:
    if min(values) == max(values):
        return float(values[0])
    return math.fsum(values) / len(values)


def standard_deviation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return math.hypot(*(value - centre for value in values)) / math.sqrt(len(values) - 1)


def subtract_mean(rewards: Sequence[float]) -> list[float]:
    centre = mean(rewards)
    return [reward - centre for reward in rewards]


def subtract_mean_of_others(rewards: Sequence[float]) -> list[float]:
    count = len(rewards)
    return [value * count / (count - 1) for value in subtract_mean(rewards)]


def divide_by_mean(rewards: Sequence[float]) -> list[float]:
    centre = mean(rewards)
    return [(reward - centre) / centre if centre else 0.0 for reward in rewards]


BASELINES: dict[str, Callable[[Sequence[float]], Sequence[float]]] = {
    "grpo": subtract_mean,
    "rloo": subtract_mean_of_others,
    "reinforce_plus_plus": subtract_mean,
    "reinforce_plus_plus_plain": subtract_mean,
    "maxrl": divide_by_mean,
    "optimal_token_baseline": list,
}


def centre(rewards: Rewards, subtract_baseline: Callable[[Sequence[float]], Sequence[float]]) -> list[float | None]:
    values = valid(rewards)
    if len(values) < 2:
        return [None] * len(rewards)
    centred = iter(subtract_baseline(values))
    return [None if reward is None else next(centred) for reward in rewards]


def group_advantages(rewards: Rewards, num_generations: int, scale: str, estimator: str) -> list[float]:
    groups = [rewards[start : start + num_generations] for start in range(0, len(rewards), num_generations)]
    compared = groups if ESTIMATORS[estimator].has_groups else [rewards]
    centred = [value for members in compared for value in centre(members, BASELINES[estimator])]
    if scale == "none":
        return [value or 0.0 for value in centred]
    if scale == "group":
        spreads = [spread for group in groups for spread in [standard_deviation(valid(group))] * len(group)]
    else:
        values = centred if estimator == "reinforce_plus_plus" else rewards
        spreads = [standard_deviation(valid(values))] * len(rewards)
    pairs = zip(centred, spreads, strict=True)
    return [0.0 if value is None else value / (spread + EPSILON) for value, spread in pairs]


def gdpo_advantages(
    scores: Sequence[Rewards], rewards: Rewards, weights: Sequence[float], num_generations: int
) -> list[float]:
    sums = [0.0 if reward is not None else None for reward in rewards]
    for start in range(0, len(rewards), num_generations):
        group = range(start, start + num_generations)
        for function, weight in enumerate(weights):
            column = [scores[i][function] if rewards[i] is not None else None for i in group]
            spread = standard_deviation(valid(column)) + GDPO_EPSILON
            for i, centred in zip(group, centre(column, subtract_mean), strict=True):
                partial_sum = sums[i]
                if centred is not None and partial_sum is not None:
                    sums[i] = partial_sum + weight * centred / spread
    values = valid(sums)
    if len(values) < 2:
        return [0.0] * len(rewards)
    middle = mean(values)
    spread = standard_deviation(values) + GDPO_EPSILON
    return [0.0 if value is None else (value - middle) / spread for value in sums]


def outcome_metrics(
    graded: Sequence[Graded], names: Sequence[str], num_generations: int, scale: str
) -> dict[str, float]:
    groups = [
        valid([one.reward for one in graded[start : start + num_generations]])
        for start in range(0, len(graded), num_generations)
    ]
    spreads = [standard_deviation(group) for group in groups]
    rewards = [reward for group in groups for reward in group]
    lengths = [one.rollout.length for one in graded]
    means = [mean(group) for group in groups if group]
    metrics = {"reward": mean(means)} if means else {}
    metrics |= {
        "reward_std": standard_deviation(rewards) if scale == "batch" else mean(spreads),
        "frac_reward_zero_std": mean([float(spread <= ZERO) for spread in spreads]),
        "completions/mean_length": mean(lengths),
        "completions/max_length": float(max(lengths)),
        "completions/min_length": float(min(lengths)),
        "completions/clipped_ratio": mean([float(one.rollout.truncated) for one in graded]),
    }
    for i, name in enumerate(names):
        values = [value for value in (one.rewards[i] for one in graded) if value is not None and usable(value)]
        if values:
            metrics |= {f"rewards/{name}/mean": mean(values), f"rewards/{name}/std": standard_deviation(values)}
    infos = [one.rollout.infos for one in graded]
    turns = [info["num_turns"] for info in infos if "num_turns" in info]
    if turns:
        metrics["num_turns"] = mean(turns)
    if any(one.rollout.earlier for one in graded):
        metrics["num_sequences"] = mean([1 + len(one.rollout.earlier) for one in graded])
    lost = [info.get("lost_turns", 0) for info in infos]
    if any(lost):
        metrics["num_turns/lost"] = mean(lost)
    failed = sum(AGENT_ERROR in info for info in infos)
    if failed:
        metrics["agents/failed"] = float(failed)
    if len(rewards) < len(graded):
        metrics["rewards/dropped"] = float(len(graded) - len(rewards))
    return metrics
