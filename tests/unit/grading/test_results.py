"""Total rewards, completions without a valid reward, and the reward metrics, which equal those of ms-swift."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_megatron_grpo.grading.graded import GradedRollouts
from swift_megatron_grpo.grading.metrics import outcome_metrics
from swift_megatron_grpo.grading.results import BadReward, add_advantages
from swift_megatron_grpo.settings.algorithm import ScaleRewards
from swift_megatron_grpo.settings.config import BadRewardPolicy, GradingConfig
from swift_megatron_grpo.types import AGENT_ERROR, Graded, Rollout
from tests.support.grading import total_rewards
from tests.unit.grading.test_rewards import SCALES, make_rollouts, reward


def config(
    num_generations: int = 2,
    weights: Sequence[float] = (1.0,),
    scale: ScaleRewards = "group",
    bad_reward: BadRewardPolicy = "stop",
) -> GradingConfig:
    names = tuple(f"function{i}" for i in range(len(weights)))
    return GradingConfig(
        num_generations=num_generations,
        reward_names=names,
        reward_weights=tuple(weights),
        scale_rewards=scale,
        bad_reward=bad_reward,
    )


def grade(rollouts: Sequence[Rollout], scores: list[list[float | None]], settings: GradingConfig) -> GradedRollouts:
    """Compute total rewards and advantages from scores."""
    return add_advantages(total_rewards(rollouts, scores, settings), settings)


# ---- bad rewards


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([None, None], "every reward function (function0, function1) returned None for prompt 0-1, completion 'bad'"),
        ([math.nan, 1.0], "reward function function0 returned nan for prompt 0-1, completion 'bad'"),
        ([None, -math.inf], "reward function function1 returned -inf for prompt 0-1, completion 'bad'"),
    ],
)
def test_a_bad_reward_stops_the_run_and_names_the_function(row: list[float | None], reason: str) -> None:
    rollouts = make_rollouts(["a", "b", "c", "bad"], group=2)
    scores: list[list[float | None]] = [[1.0, 1.0], [2.0, None], [3.0, 1.0], row]
    with pytest.raises(BadReward) as caught:
        grade(rollouts, scores, config(weights=[1.0, 1.0]))
    assert reason in str(caught.value)
    assert "1 of 4 completions have no valid reward" in str(caught.value)
    assert "--bad_reward drop" in str(caught.value)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_bad_reward_drop_excludes_the_completion(bad: float | None) -> None:
    rollouts = make_rollouts(["a", "b", "c", "d", "e", "f"], group=3)
    scores: list[list[float | None]] = [[1.0], [bad], [3.0], [1.0], [2.0], [3.0]]
    graded = grade(rollouts, scores, config(3, bad_reward="drop"))
    assert [completion.reward for completion in graded] == [1.0, None, 3.0, 1.0, 2.0, 3.0]
    assert [completion.advantage for completion in graded[:3]] == pytest.approx([-0.70706, 0.0, 0.70706], abs=1e-4)
    assert [completion.rollout for completion in graded] == rollouts
    metrics = outcome_metrics(graded.outcomes, ["function0"], 3)
    assert metrics["rewards/dropped"] == 1
    assert metrics["reward"] == 2.0
    assert all(map(math.isfinite, metrics.values()))


def test_an_agent_that_failed_has_no_valid_reward_whatever_its_scores() -> None:
    rollouts = make_rollouts(["a", "b", "c", "d"], group=2)
    rollouts[1] = replace(rollouts[1], infos={AGENT_ERROR: "LookupError: gone"})
    graded = grade(rollouts, [[1.0], [2.0], [3.0], [4.0]], config(bad_reward="drop"))
    assert [completion.reward for completion in graded] == [1.0, None, 3.0, 4.0] and graded[1].rewards == [2.0]
    metrics = outcome_metrics(graded.outcomes, ["function0"], 2)
    assert metrics["agents/failed"] == metrics["rewards/dropped"] == 1
    with pytest.raises(BadReward, match=r"the agent failed \(LookupError: gone\) for prompt 0-0, completion 'b'"):
        grade(rollouts, [[1.0], [2.0], [3.0], [4.0]], config())


def test_bad_reward_drop_stops_the_run_if_no_reward_is_valid() -> None:
    with pytest.raises(BadReward, match="nothing would be left to train on"):
        grade(make_rollouts(["a", "b"], group=2), [[None], [math.nan]], config(bad_reward="drop"))


def test_the_message_on_many_bad_rewards_is_shortened() -> None:
    with pytest.raises(BadReward, match="and 7 more"):
        grade(make_rollouts(list("abcdefghij"), group=2), [[None]] * 10, config())


# ---- metrics


@pytest.mark.parametrize("scale", SCALES)
@given(
    rows=st.lists(st.tuples(reward, st.none() | reward, st.none()), min_size=2, max_size=24).map(
        lambda rows: rows[: len(rows) // 2 * 2]
    )
)
@settings(deadline=None)
def test_metrics_equal_those_of_ms_swift(scale: ScaleRewards, rows: list[tuple[float | None, ...]]) -> None:
    from swift.rl_core.advantage import compute_reward_metrics

    weights = [1.0, 0.5, 2.0]
    names = ["a", "b", "never"]
    scores = [list(row) for row in rows]
    graded = grade(make_rollouts(["x"] * len(rows), group=2), scores, config(2, weights, scale))
    matrix = torch.tensor([[math.nan if v is None else v for v in row] for row in rows], dtype=torch.float64)
    totals = (matrix * torch.tensor(weights, dtype=torch.float64)).nansum(1)
    stock = compute_reward_metrics(totals, matrix, names, 2, scale)
    expected = {
        "reward": stock.reward_mean,
        "reward_std": stock.reward_std,
        "frac_reward_zero_std": stock.frac_reward_zero_std,
        **{f"rewards/{name}/mean": value for name, value in stock.per_func_mean.items()},
        **{f"rewards/{name}/std": value for name, value in stock.per_func_std.items()},
    }
    metrics = outcome_metrics(graded.outcomes, names, 2, scale)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert "rewards/never/mean" not in metrics
    assert "rewards/dropped" not in metrics


def test_lengths_and_truncation_are_reported() -> None:
    graded = [Graded(rollout, [1.0], 1.0, 0.0) for rollout in make_rollouts(["a", "abcd", "ab...", ""], group=2)]
    metrics = outcome_metrics(GradedRollouts.of(graded, 1).outcomes, ["f"], 2)
    assert metrics["completions/mean_length"] == 2.5
    assert metrics["completions/max_length"] == 5
    assert metrics["completions/min_length"] == 0
    assert metrics["completions/clipped_ratio"] == 0.25
