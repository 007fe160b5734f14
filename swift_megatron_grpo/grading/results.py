"""Graded completions from the scores of the reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from swift_megatron_grpo.grading.advantages import gdpo_advantages, group_advantages
from swift_megatron_grpo.grading.columns import Rewards, is_usable
from swift_megatron_grpo.grading.graded import GradedRollouts, Outcomes
from swift_megatron_grpo.grading.rewards import describe
from swift_megatron_grpo.grading.scores import Scores, total_of_scores
from swift_megatron_grpo.packing.bins import Floats
from swift_megatron_grpo.types import AGENT_ERROR, Graded, Rollout

if TYPE_CHECKING:
    from swift_megatron_grpo.settings.config import GradingConfig  # needs torch

_SHOWN = 3


class BadReward(RuntimeError):
    """A completion has no valid reward: every function returned None, or one returned NaN or infinity."""


def total_rewards(rollouts: Sequence[Rollout], scores: Scores, config: GradingConfig) -> GradedRollouts:
    """Return completions with total rewards; with --bad_reward stop, raise BadReward for one without a valid one."""
    total = len(rollouts)
    # A run that only a teacher guides has no reward functions: its completions are equally good.
    rewards = Rewards(np.zeros(total), np.ones(total, np.bool_))
    if config.reward_names:
        rewards = total_of_scores(scores, config.reward_weights)
    outcomes = Outcomes.of(rollouts, scores, rewards)
    failed = [place for place in outcomes.infos.nonzero()[0].tolist() if AGENT_ERROR in outcomes.infos[place]]
    graded = GradedRollouts(rollouts, outcomes, np.zeros(total)).with_rewards(rewards.without(failed))
    if config.bad_reward == "stop":
        _refuse_bad(graded, config)
    return graded


def subtract_kl(graded: GradedRollouts, divergences: Floats, beta: float) -> GradedRollouts:
    """Replace every reward by reward - beta * KL (`--kl_in_reward`), before advantages are computed."""
    rewards = graded.outcomes.rewards
    return graded.with_rewards(Rewards.where(rewards.valid, rewards.values - beta * divergences))


def add_advantages(graded: GradedRollouts, config: GradingConfig) -> GradedRollouts:
    """Return the completions with their advantages. Groups are consecutive and whole."""
    scores, rewards = graded.outcomes.scores, graded.outcomes.rewards
    if not rewards.valid.any():
        _refuse_bad(graded, config)
    if config.scale_rewards == "gdpo":
        return graded.with_advantages(gdpo_advantages(scores, rewards, config.reward_weights, config.num_generations))
    return graded.with_advantages(
        group_advantages(rewards, config.num_generations, config.scale_rewards, config.advantage_estimator)
    )


def _refuse_bad(graded: GradedRollouts, config: GradingConfig) -> None:
    [bad] = (~graded.outcomes.rewards.valid).nonzero()
    if not len(bad):
        return
    lines = [f"{len(bad)} of {len(graded)} completions have no valid reward:"]
    shown = [graded[place] for place in bad[:_SHOWN].tolist()]
    lines += [f"  {_reason(one, config)} for {describe(one.rollout)}" for one in shown]
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
        if value is not None and not is_usable(value)
    ]
    return " and ".join(broken) or f"the weighted sum of {list(row)} exceeds the range of fp32"
