"""Completions -> rewards -> advantages. Ranks `score` a share each; `compare` needs whole groups."""

from swift_megatron_grpo.grading.filters import Resampled, resample
from swift_megatron_grpo.grading.results import (
    BadReward,
    add_advantages,
    finish,
    reward_metrics,
    subtract_kl,
    total_rewards,
)
from swift_megatron_grpo.grading.rewards import RewardError, RewardFunctions, call_reward_functions, gym_reward

__all__ = [
    "BadReward",
    "Resampled",
    "RewardError",
    "RewardFunctions",
    "add_advantages",
    "call_reward_functions",
    "finish",
    "gym_reward",
    "resample",
    "reward_metrics",
    "subtract_kl",
    "total_rewards",
]
