"""Completions -> rewards -> advantages. Ranks `score` a share each; `finish` needs whole groups."""

from swift_megatron_grpo.grading.results import BadReward, finish, reward_metrics
from swift_megatron_grpo.grading.rewards import RewardError, RewardFunctions, score

__all__ = ["BadReward", "RewardError", "RewardFunctions", "finish", "reward_metrics", "score"]
