"""Grading of lists: rewards of which None is not valid, and rows of scores."""

from __future__ import annotations

from collections.abc import Sequence

from swift_megatron_grpo.grading import advantages, results
from swift_megatron_grpo.grading.columns import Rewards
from swift_megatron_grpo.grading.graded import GradedRollouts
from swift_megatron_grpo.grading.scores import Scores, total_of_scores
from swift_megatron_grpo.settings.algorithm import ScaleRewards
from swift_megatron_grpo.settings.config import GradingConfig
from swift_megatron_grpo.types import Rollout

Row = Sequence[float | None]


def total_reward(row: Row, weights: Sequence[float]) -> float | None:
    return total_of_scores(Scores.of([row], len(weights)), weights).at(0)


def total_rewards(rollouts: Sequence[Rollout], rows: Sequence[Row], config: GradingConfig) -> GradedRollouts:
    return results.total_rewards(rollouts, Scores.of(rows, len(config.reward_names)), config)


def group_advantages(rewards: Row, num_generations: int, scale: ScaleRewards, estimator: str = "grpo") -> list[float]:
    return advantages.group_advantages(Rewards.of(rewards), num_generations, scale, estimator).tolist()


def gdpo_advantages(rows: Sequence[Row], rewards: Row, weights: Sequence[float], num_generations: int) -> list[float]:
    scores = Scores.of(rows, len(weights))
    return advantages.gdpo_advantages(scores, Rewards.of(rewards), weights, num_generations).tolist()
