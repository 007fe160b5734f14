"""Advantage estimators: pure functions on plain floats, in fp64.

Groups are consecutive. A reward of None (see `--bad_reward`) is excluded from every mean and spread, and its advantage
is 0. A completion that has no other completion to be compared with also gets advantage 0.
"""

import math
from collections.abc import Callable, Sequence

from swift_megatron_grpo.settings.algorithm import ESTIMATORS, Estimator, ScaleRewards

_EPSILON = 1e-4  # ms-swift's
_GDPO_EPSILON = 1e-8  # ms-swift's
_LARGEST = 3.4028234663852886e38  # the largest finite fp32 value; ms-swift stores rewards in fp32
Rewards = Sequence[float | None]
Baseline = Callable[[Sequence[float]], Sequence[float]]  # at least two rewards -> rewards minus their baselines


def total_reward(rewards: Rewards, weights: Sequence[float]) -> float | None:
    """Return the weighted sum of the functions that apply; None without any, or if one returned NaN or infinity."""
    applying = [(reward, weight) for reward, weight in zip(rewards, weights, strict=True) if reward is not None]
    if not applying or not all(usable(reward) for reward, _ in applying):
        return None
    total = sum(reward * weight for reward, weight in applying)
    return total if usable(total) else None


def group_advantages(
    rewards: Rewards, num_generations: int, scale: ScaleRewards, estimator: str = "grpo"
) -> list[float]:
    """Compute advantages: reward minus baseline, divided by spread + 1e-4.

    estimator                  baseline                              paper
    grpo                       mean of the group                     https://arxiv.org/abs/2402.03300
    rloo                       mean of the rest of the group         https://arxiv.org/abs/2402.14740
    reinforce_plus_plus        mean of the group                     https://arxiv.org/abs/2501.03262, "-baseline"
    reinforce_plus_plus_plain  mean of all rewards, so one           https://arxiv.org/abs/2501.03262
                               completion per prompt is enough
    maxrl                      mean of the group, by which the       https://arxiv.org/abs/2602.02710
                               difference is divided; scale none
    optimal_token_baseline     none here: token_baselines.py         https://arxiv.org/abs/2602.07078
                               subtracts one from every token

    scale                      spread: the standard deviation of
    group                      the rewards of the group
    batch                      all rewards; for reinforce_plus_plus, all rewards minus their baselines
    none                       advantages are not divided: https://arxiv.org/abs/2503.20783

    Plugins add estimators with `register_estimator`.
    """
    if len(rewards) % num_generations:
        raise ValueError(f"{len(rewards)} rewards cannot be split into groups of {num_generations}")
    groups = [rewards[start : start + num_generations] for start in range(0, len(rewards), num_generations)]
    compared = groups if ESTIMATORS[estimator].has_groups else [rewards]
    centred = [value for members in compared for value in _centre(members, BASELINES[estimator])]

    if scale == "none":
        return [value or 0.0 for value in centred]
    if scale == "group":
        spreads = [spread for group in groups for spread in [standard_deviation(valid(group))] * len(group)]
    else:
        values = centred if estimator == "reinforce_plus_plus" else rewards
        spreads = [standard_deviation(valid(values))] * len(rewards)
    return [
        0.0 if value is None else value / (spread + _EPSILON) for value, spread in zip(centred, spreads, strict=True)
    ]


def _centre(rewards: Rewards, subtract_baseline: Baseline) -> list[float | None]:
    """Subtract the baseline of the valid rewards; return only None if there are fewer than two."""
    values = valid(rewards)
    if len(values) < 2:
        return [None] * len(rewards)
    centred = iter(subtract_baseline(values))
    return [None if reward is None else next(centred) for reward in rewards]


def _subtract_mean(rewards: Sequence[float]) -> list[float]:
    centre = mean(rewards)
    return [reward - centre for reward in rewards]


def _subtract_mean_of_others(rewards: Sequence[float]) -> list[float]:
    """Subtract from each reward the mean of the others: r - (sum - r) / (n - 1) equals n / (n - 1) * (r - mean)."""
    count = len(rewards)
    return [value * count / (count - 1) for value in _subtract_mean(rewards)]


def _divide_by_mean(rewards: Sequence[float]) -> list[float]:
    """Return (r - mean) / mean: of rewards 0 and 1, a prompt seldom solved counts as in maximum likelihood."""
    if min(rewards) < 0:
        raise ValueError(
            f"--advantage_estimator maxrl divides by the mean reward of a prompt, and a reward is {min(rewards):g}: "
            "rewards must be at least 0; use another estimator, or functions without penalties"
        )
    centre = mean(rewards)
    return [(reward - centre) / centre if centre else 0.0 for reward in rewards]


BASELINES: dict[str, Baseline] = {
    "grpo": _subtract_mean,
    "rloo": _subtract_mean_of_others,
    "reinforce_plus_plus": _subtract_mean,
    "reinforce_plus_plus_plain": _subtract_mean,
    "maxrl": _divide_by_mean,
    "optimal_token_baseline": list,
}


def register_estimator(
    name: str, *, scale_rewards: ScaleRewards, kl_in_reward: bool = False, has_groups: bool = True
) -> Callable[[Baseline], Baseline]:
    """Decorate a function that `--advantage_estimator NAME` selects, in a file of `--external_plugins`.

    It takes the valid rewards of one prompt's completions, at least two, or with `has_groups=False` those of the whole
    rollout, and returns each minus its baseline. `scale_rewards` and `kl_in_reward` are the defaults of these flags.
    """

    def register(subtract_baseline: Baseline) -> Baseline:
        def checked(rewards: Sequence[float]) -> Sequence[float]:
            centred = subtract_baseline(rewards)
            if len(centred) != len(rewards) or not all(map(math.isfinite, centred)):
                typed = f"--advantage_estimator {name}"
                raise ValueError(f"{typed} returns {centred} for {rewards}; return a finite number for each reward")
            return centred

        if name in ESTIMATORS:
            raise ValueError(f"there is an advantage estimator {name!r} already; use another name")
        for rewards in ([1.0, 0.0, 3.0], [2.0, 2.0]):
            checked(rewards)
        ESTIMATORS[name] = Estimator(scale_rewards, kl_in_reward, has_groups)
        BASELINES[name] = checked
        return subtract_baseline

    return register


def gdpo_advantages(
    scores: Sequence[Rewards], rewards: Rewards, weights: Sequence[float], num_generations: int
) -> list[float]:
    """Compute GDPO advantages, https://arxiv.org/abs/2601.05242.

    Every reward function is normalised separately within the group, so that one with large values does not dominate the
    others. The weighted sum is then normalised over the batch.

    scores: [completion][function]. A completion whose total reward is None is excluded. A function contributes 0 to a
    completion to which it does not apply, and to a group in which it applies to fewer than two completions.
    """
    sums = [0.0 if reward is not None else None for reward in rewards]
    for start in range(0, len(rewards), num_generations):
        group = range(start, start + num_generations)
        for function, weight in enumerate(weights):
            column = [scores[i][function] if rewards[i] is not None else None for i in group]
            spread = standard_deviation(valid(column)) + _GDPO_EPSILON
            for i, centred in zip(group, _centre(column, _subtract_mean), strict=True):
                partial_sum = sums[i]
                if centred is not None and partial_sum is not None:
                    sums[i] = partial_sum + weight * centred / spread
    values = valid(sums)
    if len(values) < 2:
        return [0.0] * len(rewards)
    centre = mean(values)
    spread = standard_deviation(values) + _GDPO_EPSILON
    return [0.0 if value is None else (value - centre) / spread for value in sums]


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
