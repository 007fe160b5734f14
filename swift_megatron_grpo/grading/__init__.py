"""Completions -> rewards -> advantages. Ranks `score` a share each; `compare` needs whole groups."""

from swift_megatron_grpo.grading.filters import Resampled, resample
from swift_megatron_grpo.grading.results import BadReward, compare, finish, grade, penalise, reward_metrics
from swift_megatron_grpo.grading.rewards import RewardError, RewardFunctions, gym_reward, score

__all__ = [
    "BadReward",
    "Resampled",
    "RewardError",
    "RewardFunctions",
    "compare",
    "finish",
    "grade",
    "gym_reward",
    "penalise",
    "resample",
    "reward_metrics",
    "score",
]
