"""Grading in arrays has the results of grading one completion after the other in plain Python, bit by bit."""

from __future__ import annotations

import math
import random
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_megatron_grpo.grading.graded import GradedRollouts, Outcomes
from swift_megatron_grpo.grading.metrics import outcome_metrics
from swift_megatron_grpo.grading.resampling import with_spread
from swift_megatron_grpo.grading.results import add_advantages
from swift_megatron_grpo.packing.completions import Facts, OutlinedRollouts
from swift_megatron_grpo.settings.algorithm import ESTIMATORS, MAXRL, OPTIMAL_TOKEN, WITHOUT_GROUPS, ScaleRewards
from swift_megatron_grpo.settings.config import GradingConfig
from swift_megatron_grpo.types import AGENT_ERROR, Graded, Prompt, Rollout, TokenSequence
from tests.support.grading import gdpo_advantages, group_advantages, total_rewards
from tests.unit.grading import one_by_one

WEIGHTS, NAMES = (1.0, -0.3, 2.0), ("a", "b", "c")
SCALES: list[ScaleRewards] = ["group", "batch", "none"]
PAIRS = [
    (estimator, scale)
    for estimator in ESTIMATORS
    for scale in SCALES
    if (estimator not in (MAXRL, OPTIMAL_TOKEN) or scale == "none") and (estimator, scale) != (WITHOUT_GROUPS, "group")
]
number = (
    st.floats(-1e3, 1e3)
    | st.sampled_from([0.0, 1.0, 1.0, 0.1, 1e30, -1e30, 1e-300, 3.4e38, -3.4e38])
)  # fmt: skip
score = st.none() | number | st.sampled_from([math.nan, math.inf, -math.inf])


@st.composite
def groups_of(draw: Any, values: Any) -> tuple[int, list[Any]]:
    size = draw(st.integers(1, 6))
    groups = draw(st.lists(st.lists(values, min_size=size, max_size=size), min_size=1, max_size=5))
    return size, [value for group in groups for value in group]


def bits(values: Any) -> list[bytes]:
    return [struct.pack("<d", value) for value in values]


@pytest.mark.parametrize(("estimator", "scale"), PAIRS)
@given(drawn=groups_of(st.none() | number))
@settings(deadline=None)
def test_advantages_of_every_estimator(estimator: str, scale: ScaleRewards, drawn: tuple[int, list[Any]]) -> None:
    size, rewards = drawn
    if estimator == MAXRL:
        rewards = [None if reward is None else abs(reward) for reward in rewards]
    expected = one_by_one.group_advantages(rewards, size, scale, estimator)
    assert bits(group_advantages(rewards, size, scale, estimator)) == bits(expected)


@given(drawn=groups_of(st.tuples(score, score, score)))
@settings(deadline=None)
def test_totals_and_gdpo(drawn: tuple[int, list[Any]]) -> None:
    size, rows = drawn
    rollouts = [Rollout(Prompt("", {}), [1], [1], None, "", "stop", 0) for _ in rows]
    graded = total_rewards(rollouts, rows, config(size, "group"))
    expected = [one_by_one.total_reward(row, WEIGHTS) for row in rows]
    rewards = [one.reward for one in graded]
    assert [reward is None for reward in rewards] == [reward is None for reward in expected]
    assert bits(one_by_one.valid(rewards)) == bits(one_by_one.valid(expected))
    assert str([one.rewards for one in graded]) == str([list(row) for row in rows])  # NaN differs from itself
    advantages = one_by_one.gdpo_advantages(rows, rewards, WEIGHTS, size)
    assert gdpo_advantages(rows, rewards, WEIGHTS, size) == advantages  # -0 is 0


def config(size: int, scale: ScaleRewards) -> GradingConfig:
    return GradingConfig(
        num_generations=size, reward_names=NAMES, reward_weights=WEIGHTS, scale_rewards=scale, bad_reward="drop"
    )


def rollout(rng: random.Random) -> Rollout:
    infos: dict[str, Any] = {}
    if rng.random() < 0.2:
        infos = rng.choice(({"num_turns": 3}, {"num_turns": 2, "lost_turns": 1}, {AGENT_ERROR: "gone"}, {"x": 1}))
    tokens = rng.randrange(9)
    sampled = [rng.random() < 0.7 for _ in range(tokens)] if rng.random() < 0.2 else None
    earlier = (TokenSequence([1], [2, 3], None),) if rng.random() < 0.1 else ()
    reason = rng.choice(("stop", "length"))
    return Rollout(Prompt("", {}), [1], [2] * tokens, None, "", reason, 0, sampled, infos=infos, earlier=earlier)


@pytest.mark.parametrize("seed", range(150))
def test_metrics_and_groups_with_a_spread(seed: int) -> None:
    rng = random.Random(seed)
    size, scale = rng.randrange(1, 6), rng.choice(SCALES)
    rollouts = [rollout(rng) for _ in range(size * rng.randrange(1, 9))]
    values = (None, 0.0, 1.0, 1.0, 0.1, rng.random(), math.nan)
    rows = [[rng.choice(values) for _ in NAMES] for _ in rollouts]
    graded = total_rewards(rollouts, rows, config(size, scale))
    objects = list(graded)
    metrics = outcome_metrics(graded.outcomes, NAMES, size, scale)
    assert metrics == one_by_one.outcome_metrics(objects, NAMES, size, scale)
    groups = [objects[i : i + size] for i in range(0, len(objects), size)]
    spreads = [one_by_one.standard_deviation(one_by_one.valid([one.reward for one in group])) for group in groups]
    assert with_spread(graded, size).tolist() == [spread > 0 for spread in spreads]


@pytest.mark.parametrize("seed", range(50))
def test_completions_without_tokens_are_graded_like_those_with_tokens(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randrange(1, 6)
    rollouts = [rollout(rng) for _ in range(size * rng.randrange(1, 9))]
    rollouts = [one for one in rollouts if not one.earlier][: len(rollouts) // size * size]
    rollouts = rollouts[: len(rollouts) // size * size]
    if not rollouts:
        return
    count = len(rollouts)
    facts = Facts(
        prompt=np.ones(count, np.int64),
        completion=np.array([len(one.completion_ids) for one in rollouts]),
        sampled=np.array([one.length for one in rollouts]),
        first=np.zeros(count, np.int64),
        home=np.arange(count),
        version=np.zeros(count, np.int64),
        has_logprobs=np.zeros(count, np.bool_),
        truncated=np.array([one.truncated for one in rollouts]),
        asked=np.fromiter((one.prompt for one in rollouts), np.object_, count),
        rare=np.fromiter(((one.finish_reason, one.infos, None) if one.infos else None for one in rollouts), np.object_),
    )
    rows = [[rng.choice((1.0, 0.0, rng.random())) for _ in NAMES] for _ in rollouts]
    grading = config(size, "group")
    whole = add_advantages(total_rewards(rollouts, rows, grading), grading)
    outlined = add_advantages(total_rewards(OutlinedRollouts(facts), rows, grading), grading)
    for ours, theirs in zip(outlined, whole, strict=True):
        assert (ours.rewards, ours.reward, ours.advantage) == (theirs.rewards, theirs.reward, theirs.advantage)
        assert ours.rollout.length == theirs.rollout.length and ours.rollout.infos == theirs.rollout.infos
    assert outcome_metrics(outlined.outcomes, NAMES, size) == outcome_metrics(whole.outcomes, NAMES, size)


def test_slices_and_joined_parts_are_those_of_the_objects() -> None:
    rng = random.Random(0)
    rows: list[list[float | None]] = [[rng.random(), None, math.inf] for _ in range(12)]
    objects = [Graded(rollout(rng), row, row[0] if i % 3 else None, i / 8) for i, row in enumerate(rows)]
    graded = GradedRollouts.of(objects, len(NAMES))
    assert list(graded) == objects and list(graded[2:7]) == objects[2:7] and graded[-1] == objects[-1]
    parts = [graded[8:], graded[0:0], graded[:8]]
    joined = GradedRollouts.joined(parts)
    assert list(joined) == objects[8:] + objects[:8]
    assert Outcomes.joined([part.outcomes for part in parts]).lengths.tolist() == [one.rollout.length for one in joined]
