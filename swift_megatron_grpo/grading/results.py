"""What the reward functions said -> what is trained on, and the numbers for the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from swift_megatron_grpo.grading.advantages import gdpo_advantages, group_advantages, total_reward
from swift_megatron_grpo.grading.rewards import Scores, describe
from swift_megatron_grpo.grading.statistics import mean, standard_deviation, usable, valid
from swift_megatron_grpo.types import Graded, Rollout

if TYPE_CHECKING:
    from swift_megatron_grpo.config import GradingConfig, ScaleRewards  # needs torch

_ZERO = 1e-8  # below it, ms-swift counts a standard deviation as 0
_SHOWN = 3


class BadReward(RuntimeError):
    """A completion has no valid reward: every function said None, or one said NaN or infinity."""


def total_rewards(rollouts: Sequence[Rollout], scores: Scores, config: GradingConfig) -> list[Graded]:
    """Completions with their total rewards, without advantages yet. One without a valid reward: see `--bad_reward`."""
    rewards = [total_reward(row, config.reward_weights) for row in scores]
    graded = [Graded(*each, advantage=0.0) for each in zip(rollouts, scores, rewards, strict=True)]
    if config.bad_reward == "stop":
        _refuse_bad(graded, config)
    return graded


def subtract_kl(graded: Sequence[Graded], divergences: Sequence[float], beta: float) -> list[Graded]:
    """reward - beta KL: what `--kl_in_reward` does before completions are compared."""
    return [
        each if each.reward is None else replace(each, reward=each.reward - beta * divergence)
        for each, divergence in zip(graded, divergences, strict=True)
    ]


def add_advantages(graded: Sequence[Graded], num_generations: int, config: GradingConfig) -> list[Graded]:
    """Advantages. Groups are consecutive and whole."""
    rewards = [each.reward for each in graded]
    if all(reward is None for reward in rewards):
        _refuse_bad(graded, config)
    if config.scale_rewards == "gdpo":
        scores = [each.rewards for each in graded]
        advantages = gdpo_advantages(scores, rewards, config.reward_weights, num_generations)
    else:
        advantages = group_advantages(rewards, num_generations, config.scale_rewards, config.estimator)
    return [replace(each, advantage=advantage) for each, advantage in zip(graded, advantages, strict=True)]


def finish(rollouts: Sequence[Rollout], scores: Scores, num_generations: int, config: GradingConfig) -> list[Graded]:
    """From scores to advantages, where nothing comes between."""
    return add_advantages(total_rewards(rollouts, scores, config), num_generations, config)


def _refuse_bad(graded: Sequence[Graded], config: GradingConfig) -> None:
    bad = [i for i, each in enumerate(graded) if each.reward is None]
    if bad:
        rollouts, scores = [each.rollout for each in graded], [each.rewards for each in graded]
        raise BadReward(_complaint(bad, rollouts, scores, config))


def _complaint(bad: Sequence[int], rollouts: Sequence[Rollout], scores: Scores, config: GradingConfig) -> str:
    lines = [f"{len(bad)} of {len(rollouts)} completions have no valid reward:"]
    lines += [f"  {_reason(scores[i], config)} for {describe(rollouts[i])}" for i in bad[:_SHOWN]]
    if len(bad) > _SHOWN:
        lines.append(f"  and {len(bad) - _SHOWN} more")
    if config.bad_reward == "stop":
        lines.append("--bad_reward drop goes on without such completions: they leave their group and are not trained")
    else:
        lines.append("--bad_reward drop leaves such completions out, but now nothing would be left to train on")
    return "\n".join(lines)


def _reason(row: Sequence[float | None], config: GradingConfig) -> str:
    if all(value is None for value in row):
        return f"every reward function ({', '.join(config.reward_names)}) returned None"
    broken = [
        f"reward function {name} returned {value}"
        for name, value in zip(config.reward_names, row, strict=True)
        if value is not None and not usable(value)
    ]
    return " and ".join(broken) or f"the weighted sum of {list(row)} is beyond fp32"


def reward_metrics(
    graded: Sequence[Graded], names: Sequence[str], num_generations: int, scale: ScaleRewards = "group"
) -> dict[str, float]:
    """By ms-swift's names and formulas. Dropped completions are in none of the reward numbers."""
    groups = [
        valid([each.reward for each in graded[start : start + num_generations]])
        for start in range(0, len(graded), num_generations)
    ]
    spreads = [standard_deviation(group) for group in groups]
    rewards = [reward for group in groups for reward in group]
    lengths = [each.rollout.length for each in graded]
    metrics = {
        "reward": mean([mean(group) for group in groups if group]),
        "reward_std": standard_deviation(rewards) if scale == "batch" else mean(spreads),
        "frac_reward_zero_std": mean([float(spread <= _ZERO) for spread in spreads]),
        "completions/mean_length": mean(lengths),
        "completions/max_length": float(max(lengths)),
        "completions/min_length": float(min(lengths)),
        "completions/clipped_ratio": mean([float(each.rollout.truncated) for each in graded]),
    }
    for i, name in enumerate(names):
        said = [value for value in (each.rewards[i] for each in graded) if value is not None and usable(value)]
        if said:  # a function that applies to none of these completions has no mean
            metrics |= {f"rewards/{name}/mean": mean(said), f"rewards/{name}/std": standard_deviation(said)}
    turns = [each.rollout.infos["num_turns"] for each in graded if "num_turns" in each.rollout.infos]
    if turns:
        metrics["num_turns"] = mean(turns)
    lost = [each.rollout.infos.get("lost_turns", 0) for each in graded]
    if any(lost):
        metrics["num_turns/lost"] = mean(lost)
    if len(rewards) < len(graded):
        metrics["rewards/dropped"] = float(len(graded) - len(rewards))
    return metrics
