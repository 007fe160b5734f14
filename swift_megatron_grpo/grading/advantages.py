"""Advantage estimators: pure functions on arrays, in fp64.

Groups are consecutive. A reward that is not valid (see `--bad_reward`) is excluded from every mean and spread, and its
advantage is 0. A completion that has no other completion to be compared with also gets advantage 0.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from swift_megatron_grpo.grading.columns import Rewards, mean_and_deviation, means, standard_deviations
from swift_megatron_grpo.grading.scores import Scores
from swift_megatron_grpo.packing.bins import Floats
from swift_megatron_grpo.settings.algorithm import ESTIMATORS, Estimator, ScaleRewards

_EPSILON = 1e-4  # ms-swift's
_GDPO_EPSILON = 1e-8  # ms-swift's
Baseline = Callable[[Rewards], Floats]  # groups with at least two rewards each -> rewards minus their baselines
BaselineOfGroup = Callable[[Sequence[float]], Sequence[float]]  # the same of one group, for plugins


def group_advantages(rewards: Rewards, num_generations: int, scale: ScaleRewards, estimator: str = "grpo") -> Floats:
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
    groups = rewards.in_groups(num_generations)
    compared = groups if ESTIMATORS[estimator].has_groups else rewards.in_one_group()
    centred = _centre(compared, BASELINES[estimator])
    values, valid = centred.values.ravel(), centred.valid.ravel()
    if scale == "none":
        return values + 0.0  # not -0
    if scale == "group":
        spreads: Floats | float = np.repeat(standard_deviations(groups, means(groups)), num_generations)
    else:
        _, spreads = mean_and_deviation(centred if estimator == "reinforce_plus_plus" else rewards)
    return np.where(valid, values / (spreads + _EPSILON), 0.0)


def _centre(groups: Rewards, subtract_baseline: Baseline) -> Rewards:
    """Subtract the baselines of groups; no reward is valid in a group with fewer than two."""
    several = groups.counts >= 2
    centred = np.zeros_like(groups.values)
    if several.any():
        centred[several] = subtract_baseline(groups.pick(several))
    return Rewards.where(groups.valid & several[:, None], centred)


def _subtract_mean(groups: Rewards) -> Floats:
    return groups.values - means(groups)[:, None]


def _subtract_mean_of_others(groups: Rewards) -> Floats:
    """Subtract from each reward the mean of the others: r - (sum - r) / (n - 1) equals n / (n - 1) * (r - mean)."""
    counts = groups.counts[:, None]
    return _subtract_mean(groups) * counts / (counts - 1)


def _divide_by_mean(groups: Rewards) -> Floats:
    """Return (r - mean) / mean: of rewards 0 and 1, a prompt seldom solved counts as in maximum likelihood."""
    lowest = groups.lowest
    if (lowest < 0).any():
        raise ValueError(
            "--advantage_estimator maxrl divides by the mean reward of a prompt, and a reward is "
            f"{lowest[lowest < 0][0]:g}: rewards must be at least 0; use another estimator, or functions without "
            "penalties"
        )
    centres = means(groups)[:, None]
    return np.where(centres != 0, (groups.values - centres) / np.where(centres != 0, centres, 1.0), 0.0)


def _subtract_nothing(groups: Rewards) -> Floats:
    return groups.values


BASELINES: dict[str, Baseline] = {
    "grpo": _subtract_mean,
    "rloo": _subtract_mean_of_others,
    "reinforce_plus_plus": _subtract_mean,
    "reinforce_plus_plus_plain": _subtract_mean,
    "maxrl": _divide_by_mean,
    "optimal_token_baseline": _subtract_nothing,
}


def register_estimator(
    name: str, *, scale_rewards: ScaleRewards, kl_in_reward: bool = False, has_groups: bool = True
) -> Callable[[BaselineOfGroup], BaselineOfGroup]:
    """Decorate a function that `--advantage_estimator NAME` selects, in a file of `--external_plugins`.

    It takes the valid rewards of one prompt's completions, at least two, or with `has_groups=False` those of the whole
    rollout, and returns each minus its baseline. `scale_rewards` and `kl_in_reward` are the defaults of these flags.
    """

    def register(subtract_baseline: BaselineOfGroup) -> BaselineOfGroup:
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
        BASELINES[name] = _of_every_group(checked)
        return subtract_baseline

    return register


def _of_every_group(subtract_baseline: BaselineOfGroup) -> Baseline:
    def of_groups(groups: Rewards) -> Floats:
        centred = np.zeros_like(groups.values)
        for row, values, valid in zip(centred, groups.values, groups.valid, strict=True):
            row[valid] = subtract_baseline(values[valid].tolist())
        return centred

    return of_groups


def gdpo_advantages(scores: Scores, rewards: Rewards, weights: Sequence[float], num_generations: int) -> Floats:
    """Compute GDPO advantages, https://arxiv.org/abs/2601.05242.

    Every reward function is normalised separately within the group, so that one with large values does not dominate the
    others. The weighted sum is then normalised over the batch.

    A completion whose total reward is not valid is excluded. A function contributes 0 to a completion to which it does
    not apply, and to a group in which it applies to fewer than two completions.
    """
    sums = np.zeros(len(rewards))
    for function, weight in enumerate(weights):
        applies = scores.applies[:, function] & rewards.valid
        groups = Rewards.where(applies, scores.values[:, function]).in_groups(num_generations)
        spreads = standard_deviations(groups, means(groups))[:, None] + _GDPO_EPSILON
        sums += (weight * _centre(groups, _subtract_mean).values / spreads).ravel()
    joined = Rewards.where(rewards.valid, sums)
    centred = _centre(joined.in_one_group(), _subtract_mean).values.ravel()
    _, spread = mean_and_deviation(joined)
    return centred / (spread + _GDPO_EPSILON)
