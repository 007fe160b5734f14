"""The reward metrics of the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from swift_megatron_grpo.grading.columns import Rewards, mean_and_deviation, means, standard_deviations
from swift_megatron_grpo.grading.graded import Outcomes
from swift_megatron_grpo.packing.bins import Floats, Objects
from swift_megatron_grpo.types import AGENT_ERROR

if TYPE_CHECKING:
    from swift_megatron_grpo.settings.algorithm import ScaleRewards

_ZERO = 1e-8  # below it, ms-swift counts a standard deviation as 0


def outcome_metrics(
    outcomes: Outcomes, names: Sequence[str], num_generations: int, scale: ScaleRewards = "group"
) -> dict[str, float]:
    """Compute the reward metrics, with ms-swift's names and formulas, without the dropped completions."""
    rewards, total = outcomes.rewards, len(outcomes.rewards)
    groups = rewards.in_groups(num_generations)
    centres = means(groups)
    spreads = standard_deviations(groups, centres)
    filled = groups.counts > 0
    metrics = {"reward": _mean(centres[filled])} if filled.any() else {}  # an evaluation may have no valid reward
    metrics |= {
        "reward_std": mean_and_deviation(rewards)[1] if scale == "batch" else _mean(spreads),
        "frac_reward_zero_std": float((spreads <= _ZERO).mean()),
        "completions/mean_length": float(outcomes.lengths.mean()),
        "completions/max_length": float(outcomes.lengths.max()),
        "completions/min_length": float(outcomes.lengths.min()),
        "completions/clipped_ratio": float(outcomes.truncated.mean()),
    }
    for i, name in enumerate(names):
        scores = outcomes.scores.column(i)
        if scores.valid.any():  # a function that applies to none of these completions has no mean
            metrics[f"rewards/{name}/mean"], metrics[f"rewards/{name}/std"] = mean_and_deviation(scores)
    if (outcomes.sequences > 1).any():
        metrics["num_sequences"] = float(outcomes.sequences.mean())
    metrics |= _metrics_of_turns(outcomes.infos)
    if dropped := total - int(rewards.valid.sum()):
        metrics["rewards/dropped"] = float(dropped)
    return metrics


def _metrics_of_turns(infos: Objects) -> dict[str, float]:
    """Return metrics of conversations and agents; none of completions without infos."""
    given = infos[infos.nonzero()].tolist()
    metrics = {}
    turns = [info["num_turns"] for info in given if "num_turns" in info]
    if turns:
        metrics["num_turns"] = _mean(np.array(turns, np.float64))
    lost = [info.get("lost_turns", 0) for info in given]
    if any(lost):
        metrics["num_turns/lost"] = _mean(np.array(lost + [0] * (len(infos) - len(given)), np.float64))
    failed = sum(AGENT_ERROR in info for info in given)
    if failed:
        metrics["agents/failed"] = float(failed)
    return metrics


def _mean(values: Floats) -> float:
    return float(means(Rewards(values, np.ones(len(values), np.bool_)).in_one_group())[0])
