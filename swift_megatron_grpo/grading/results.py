"""Graded completions from the scores of the reward functions, and the reward metrics of the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from swift_megatron_grpo.grading.advantages import (
    gdpo_advantages,
    group_advantages,
    mean,
    standard_deviation,
    total_reward,
    usable,
    valid,
)
from swift_megatron_grpo.grading.rewards import Scores, describe
from swift_megatron_grpo.types import AGENT_ERROR, Graded, Outcome, Rollout

if TYPE_CHECKING:
    from swift_megatron_grpo.settings.algorithm import ScaleRewards
    from swift_megatron_grpo.settings.config import GradingConfig  # needs torch

_ZERO = 1e-8  # below it, ms-swift counts a standard deviation as 0
_SHOWN = 3


class BadReward(RuntimeError):
    """A completion has no valid reward: every function returned None, or one returned NaN or infinity."""


def total_rewards(rollouts: Sequence[Rollout], scores: Scores, config: GradingConfig) -> list[Graded]:
    """Return completions with total rewards; None or, with --bad_reward stop, BadReward for one without a valid one."""
    # A run that only a teacher guides has no reward functions: its completions are equally good.
    rewards = [total_reward(row, config.reward_weights) if config.reward_names else 0.0 for row in scores]
    rewards = [
        None if AGENT_ERROR in rollout.infos else reward for rollout, reward in zip(rollouts, rewards, strict=True)
    ]
    graded = [
        Graded(rollout, row, reward, advantage=0.0)
        for rollout, row, reward in zip(rollouts, scores, rewards, strict=True)
    ]
    if config.bad_reward == "stop":
        _refuse_bad(graded, config)
    return graded


def subtract_kl(graded: Sequence[Graded], divergences: Sequence[float], beta: float) -> list[Graded]:
    """Replace every reward by reward - beta * KL (`--kl_in_reward`), before advantages are computed."""
    return [
        completion if completion.reward is None else replace(completion, reward=completion.reward - beta * divergence)
        for completion, divergence in zip(graded, divergences, strict=True)
    ]


def add_advantages(graded: Sequence[Graded], config: GradingConfig) -> list[Graded]:
    """Return the completions with their advantages. Groups are consecutive and whole."""
    rewards = [completion.reward for completion in graded]
    if all(reward is None for reward in rewards):
        _refuse_bad(graded, config)
    if config.scale_rewards == "gdpo":
        scores = [completion.rewards for completion in graded]
        advantages = gdpo_advantages(scores, rewards, config.reward_weights, config.num_generations)
    else:
        advantages = group_advantages(rewards, config.num_generations, config.scale_rewards, config.advantage_estimator)
    return [replace(completion, advantage=advantage) for completion, advantage in zip(graded, advantages, strict=True)]


def _refuse_bad(graded: Sequence[Graded], config: GradingConfig) -> None:
    bad = [completion for completion in graded if completion.reward is None]
    if not bad:
        return
    lines = [f"{len(bad)} of {len(graded)} completions have no valid reward:"]
    lines += [f"  {_reason(one, config)} for {describe(one.rollout)}" for one in bad[:_SHOWN]]
    if len(bad) > _SHOWN:
        lines.append(f"  and {len(bad) - _SHOWN} more")
    advice = "--bad_reward drop removes such completions, but nothing would be left to train on"
    if config.bad_reward == "stop":
        advice = "use --bad_reward drop to continue without them: they are removed from their groups and not trained"
    raise BadReward("\n".join([*lines, advice]))


def _reason(graded: Graded, config: GradingConfig) -> str:
    row = graded.rewards
    if AGENT_ERROR in graded.rollout.infos:
        return f"the agent failed ({graded.rollout.infos[AGENT_ERROR]})"
    if all(value is None for value in row):
        return f"every reward function ({', '.join(config.reward_names)}) returned None"
    verb = "returned" if config.bad_reward == "stop" else "raised, or returned"
    broken = [
        f"reward function {name} {verb} {value}"
        for name, value in zip(config.reward_names, row, strict=True)
        if value is not None and not usable(value)
    ]
    return " and ".join(broken) or f"the weighted sum of {list(row)} exceeds the range of fp32"


def outcome_metrics(
    outcomes: Sequence[Outcome], names: Sequence[str], num_generations: int, scale: ScaleRewards = "group"
) -> dict[str, float]:
    """Compute the reward metrics, with ms-swift's names and formulas, without the dropped completions."""
    groups = [
        valid([completion.reward for completion in outcomes[start : start + num_generations]])
        for start in range(0, len(outcomes), num_generations)
    ]
    spreads = [standard_deviation(group) for group in groups]
    rewards = [reward for group in groups for reward in group]
    lengths = [completion.length for completion in outcomes]
    means = [mean(group) for group in groups if group]
    metrics = {"reward": mean(means)} if means else {}  # an evaluation may have no valid reward
    metrics |= {
        "reward_std": standard_deviation(rewards) if scale == "batch" else mean(spreads),
        "frac_reward_zero_std": mean([float(spread <= _ZERO) for spread in spreads]),
        "completions/mean_length": mean(lengths),
        "completions/max_length": float(max(lengths)),
        "completions/min_length": float(min(lengths)),
        "completions/clipped_ratio": mean([float(completion.truncated) for completion in outcomes]),
    }
    for i, name in enumerate(names):
        column = [completion.rewards[i] for completion in outcomes]
        values = [value for value in column if value is not None and usable(value)]
        if values:  # a function that applies to none of these completions has no mean
            metrics |= {f"rewards/{name}/mean": mean(values), f"rewards/{name}/std": standard_deviation(values)}
    infos = [completion.infos for completion in outcomes]
    turns = [info["num_turns"] for info in infos if "num_turns" in info]
    if turns:
        metrics["num_turns"] = mean(turns)
    if any(completion.sequences > 1 for completion in outcomes):
        metrics["num_sequences"] = mean([completion.sequences for completion in outcomes])
    lost = [info.get("lost_turns", 0) for info in infos]
    if any(lost):
        metrics["num_turns/lost"] = mean(lost)
    failed = sum(AGENT_ERROR in info for info in infos)
    if failed:
        metrics["agents/failed"] = float(failed)
    if len(rewards) < len(outcomes):
        metrics["rewards/dropped"] = float(len(outcomes) - len(rewards))
    return metrics


# ---- dynamic sampling (DAPO, https://arxiv.org/abs/2503.14476): groups of equal rewards give no gradient

Draw = Callable[[int], Sequence[Graded]]  # n -> n groups of further prompts, generated and graded


class Resampled(NamedTuple):
    graded: list[Graded]  # as many as before
    rounds: int  # rounds in which more groups were generated
    generated: int  # groups generated in total, including the first ones
    uniform: int  # groups of equal rewards that remain because the rounds ran out

    def metrics(self) -> dict[str, float]:
        return {
            "dynamic_sample/rounds": float(self.rounds),
            "dynamic_sample/generated_groups": float(self.generated),
            "dynamic_sample/uniform_groups": float(self.uniform),
        }


def has_spread(group: Sequence[Graded]) -> bool:
    return standard_deviation(valid([graded.reward for graded in group])) > 0


def resample(first: Sequence[Graded], num_generations: int, max_times: int, draw: Draw) -> Resampled:
    """Replace groups of equal rewards by groups of further prompts, in at most `max_times` rounds.

    Every group with a spread is kept, and only the missing number of groups is generated. If the rounds run out, the
    batch is filled with the first groups without a spread: the batch keeps its size, and their advantages are 0.
    """
    group_count = len(first) // num_generations
    informative: list[Sequence[Graded]] = []
    uniform: list[Sequence[Graded]] = []
    rounds = 0
    new = first
    while True:
        for start in range(0, len(new), num_generations):
            group = new[start : start + num_generations]
            (informative if has_spread(group) else uniform).append(group)
        missing = group_count - len(informative)
        if missing == 0 or rounds == max_times:
            break
        new = draw(missing)
        rounds += 1
    groups = informative + uniform[:missing]
    return Resampled(
        graded=[graded for group in groups for graded in group],
        rounds=rounds,
        generated=len(informative) + len(uniform),
        uniform=missing,
    )
