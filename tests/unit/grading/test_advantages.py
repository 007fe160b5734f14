"""Advantage estimators, compared with the formulas of their papers and, where it is correct, with ms-swift."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_megatron_grpo.settings.algorithm import ESTIMATORS, MAXRL, OPTIMAL_TOKEN, WITHOUT_GROUPS, ScaleRewards
from tests.support.grading import gdpo_advantages, group_advantages

OWN = (WITHOUT_GROUPS, MAXRL, OPTIMAL_TOKEN)
WITH_GROUPS = tuple(name for name in ESTIMATORS if name not in OWN)
SCALES: list[ScaleRewards] = ["group", "batch", "none"]
PAIRS = [
    (e, s)
    for e in ESTIMATORS
    for s in SCALES
    if e not in (MAXRL, OPTIMAL_TOKEN) and (e, s) != (WITHOUT_GROUPS, "group")
]
K = 4
reward = st.floats(-100, 100).map(lambda value: round(value, 3))
batches = st.lists(st.lists(reward, min_size=K, max_size=K), min_size=1, max_size=6)
maybe = st.none() | st.sampled_from([1e30, -1e30, 0.0, 1e-30, 3.4e38, -3.4e38])


def std(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def formula(groups: list[list[float]], estimator: str, scale: str) -> list[float]:
    """Compute advantages as in the papers: subtract a baseline, then divide by a scale."""
    everything = [r for group in groups for r in group]
    centred = []
    for group in groups:
        for i, r in enumerate(group):
            if estimator == "rloo":
                baseline = statistics.fmean(group[:i] + group[i + 1 :])
            elif estimator == "reinforce_plus_plus_plain":
                baseline = statistics.fmean(everything)
            else:
                baseline = statistics.fmean(group)
            centred.append(r - baseline)
    advantages = []
    for place, value in enumerate(centred):
        if scale == "none":
            advantages.append(value)
        elif scale == "group":
            advantages.append(value / (std(groups[place // K]) + 1e-4))
        else:
            advantages.append(value / (std(centred if estimator == "reinforce_plus_plus" else everything) + 1e-4))
    return advantages


@pytest.mark.parametrize(("estimator", "scale"), PAIRS)
@given(groups=batches)
@settings(deadline=None)
def test_advantages_equal_the_formula_of_the_paper(
    estimator: str, scale: ScaleRewards, groups: list[list[float]]
) -> None:
    rewards = [r for group in groups for r in group]
    advantages = group_advantages(rewards, K, scale, estimator)
    assert advantages == pytest.approx(formula(groups, estimator, scale), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("estimator", WITH_GROUPS)
@pytest.mark.parametrize("scale", SCALES)
@given(groups=batches)
@settings(deadline=None)
def test_advantages_equal_those_of_ms_swift(estimator: str, scale: ScaleRewards, groups: list[list[float]]) -> None:
    from swift.rl_core.advantage import compute_advantages

    rewards = [r for group in groups for r in group]
    one = torch.ones(1, dtype=torch.float64)
    expected, _ = compute_advantages(torch.tensor(rewards, dtype=torch.float64)[:, None], one, K, estimator, scale)
    assert group_advantages(rewards, K, scale, estimator) == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-6)


def test_one_completion_per_prompt_is_compared_with_the_whole_batch() -> None:
    """ms-swift's reinforce_plus_plus compares the completion with itself, so that every advantage is 0."""
    rewards = [0.0, 1.0, 1.0, 4.0]
    assert group_advantages(rewards, 1, "none", "reinforce_plus_plus_plain") == [-1.5, -0.5, -0.5, 2.5]
    assert group_advantages(rewards, 1, "batch", "reinforce_plus_plus") == [0.0] * 4


@pytest.mark.parametrize("estimator", WITH_GROUPS)
@pytest.mark.parametrize("scale", SCALES)
@given(value=st.floats(-1e30, 1e30))
def test_equal_rewards_have_advantages_of_exactly_zero(estimator: str, scale: ScaleRewards, value: float) -> None:
    assert group_advantages([value] * K + [1.0, 2.0, 3.0, 4.0], K, scale, estimator)[:K] == [0.0] * K


@pytest.mark.parametrize(("estimator", "scale"), [("grpo", "group"), ("grpo", "none"), ("rloo", "none")])
@given(groups=batches, shift=st.floats(-1000, 1000))
def test_a_constant_added_to_the_rewards_of_a_group_has_no_effect(
    estimator: str, scale: ScaleRewards, groups: list[list[float]], shift: float
) -> None:
    plain = [r for group in groups for r in group]
    shifted = [r + shift for r in groups[0]] + plain[K:]
    expected = group_advantages(plain, K, scale, estimator)
    assert group_advantages(shifted, K, scale, estimator) == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(("estimator", "scale"), PAIRS)
@given(groups=batches, order=st.randoms(use_true_random=False))
def test_advantages_do_not_depend_on_the_order(
    estimator: str, scale: ScaleRewards, groups: list[list[float]], order: Any
) -> None:
    places = [(g, i) for g in range(len(groups)) for i in range(K)]
    moved = [(g, i) for g in order.sample(range(len(groups)), len(groups)) for i in order.sample(range(K), K)]

    def advantages(places: list[tuple[int, int]]) -> dict[tuple[int, int], float]:
        rewards = [groups[g][i] for g, i in places]
        return dict(zip(places, group_advantages(rewards, K, scale, estimator), strict=True))

    assert advantages(moved) == pytest.approx(advantages(places), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("estimator", "scale"), PAIRS)
@given(rewards=st.lists(maybe, min_size=2 * K, max_size=2 * K))
def test_extreme_and_missing_rewards_give_finite_advantages(
    estimator: str, scale: ScaleRewards, rewards: list[float | None]
) -> None:
    advantages = group_advantages(rewards, K, scale, estimator)
    assert all(map(math.isfinite, advantages))
    assert all(a == 0 for a, r in zip(advantages, rewards, strict=True) if r is None)


@pytest.mark.parametrize("estimator", WITH_GROUPS)
def test_a_dropped_completion_does_not_affect_the_others(estimator: str) -> None:
    without = group_advantages([1.0, 5.0, 3.0], 3, "group", estimator)
    advantages = group_advantages([1.0, None, 5.0, 3.0], 4, "group", estimator)
    assert advantages == pytest.approx([without[0], 0.0, without[1], without[2]])


# ---- gdpo

scores = st.lists(st.tuples(reward, reward, reward), min_size=2 * K, max_size=2 * K)


@given(rows=scores)
@settings(deadline=None)
def test_gdpo_advantages_equal_those_of_ms_swift(rows: list[tuple[float, float, float]]) -> None:
    from swift.rl_core.advantage import compute_advantages

    weights = [1.0, 0.5, 2.0]
    expected, _ = compute_advantages(
        torch.tensor(rows, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64), K, scale_rewards="gdpo"
    )
    assert gdpo_advantages(rows, [1.0] * len(rows), weights, K) == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-5)


def test_gdpo_advantages_equal_those_computed_by_hand() -> None:
    """Functions of very different magnitude have equal weight; the second does not apply to the third completion."""
    rows = [(0.0, 100.0), (1.0, 300.0), (2.0, None), (5.0, 7.0)]
    first, second = statistics.stdev([0, 1, 2]), statistics.stdev([100, 300])
    sums = [-1 / first - 100 / second, 0 / first + 100 / second, 1 / first]
    expected = [(s - statistics.fmean(sums)) / statistics.stdev(sums) for s in sums]
    # The last completion has no valid reward and is excluded from all statistics.
    rows, rewards = [*rows[:3], rows[3]], [100.0, 301.0, 2.0, None]
    assert gdpo_advantages(rows, rewards, [1.0, 1.0], 4) == pytest.approx([*expected, 0.0], rel=1e-6)


@given(rows=st.lists(st.tuples(maybe, maybe), min_size=2 * K, max_size=2 * K), dropped=st.sets(st.integers(0, 7)))
def test_gdpo_advantages_are_finite(rows: list[tuple[float | None, float | None]], dropped: set[int]) -> None:
    rewards = [None if i in dropped or row == (None, None) else 0.0 for i, row in enumerate(rows)]
    advantages = gdpo_advantages(rows, rewards, [1.0, 1.0], K)
    assert all(map(math.isfinite, advantages))
    assert all(advantages[i] == 0 for i, r in enumerate(rewards) if r is None)


def test_gdpo_advantages_of_equal_rewards_are_zero() -> None:
    assert gdpo_advantages([(3.0, -1e30)] * 8, [1.0] * 8, [1.0, 2.0], K) == [0.0] * 8


@given(
    groups=st.lists(st.lists(st.booleans(), min_size=K, max_size=K), min_size=1, max_size=6), seed=st.integers(0, 99)
)
@settings(deadline=None)
def test_maxrl_weights_the_mean_of_solutions_as_maximum_likelihood(groups: list[list[bool]], seed: int) -> None:
    """The estimator of the paper: the mean score of a prompt's solutions minus that of all, 0 without a solution."""
    scores = torch.randn(len(groups), K, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    advantages = group_advantages([float(solved) for group in groups for solved in group], K, "none", MAXRL)
    for group, of_group, values in zip(groups, scores, torch.tensor(advantages).view(-1, K).double(), strict=True):
        solutions = of_group[torch.tensor(group)]
        expected = solutions.mean() - of_group.mean() if len(solutions) else torch.tensor(0.0)
        assert float((values * of_group).mean()) == pytest.approx(float(expected), abs=1e-6)


def test_maxrl_divides_any_rewards_by_their_mean_and_refuses_penalties() -> None:
    assert group_advantages([0.0, 1.0, 2.0, 5.0], K, "none", MAXRL) == [-1.0, -0.5, 0.0, 1.5]
    assert group_advantages([0.0, None, 3.0, None], K, "none", MAXRL) == [-1.0, 0.0, 1.0, 0.0]
    assert group_advantages([0.0] * K, K, "none", MAXRL) == [0.0] * K
    with pytest.raises(ValueError, match=r"maxrl divides by the mean reward of a prompt, and a reward is -0\.5"):
        group_advantages([0.0, 1.0, -0.5, 1.0], K, "none", MAXRL)
