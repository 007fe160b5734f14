"""The rule for rollouts ahead of the one that is trained: which may start, and how stale they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_megatron_grpo.loop.run_ahead import RunAhead
from swift_megatron_grpo.types import Prompt, Rollout, TokenSequence


def started_ahead(rule: RunAhead, training: int, engine_version: int, idle: bool) -> list[int]:
    """Start rollouts while one is trained, as Rollouts does: the first one makes the engine busy."""
    newest = rule.first_version + (training - rule.first_rollout) * rule.steps_per_rollout
    started: list[int] = []
    while rule.in_window(rollout := training + 1 + len(started), training):
        if not rule.may_start(rollout, engine_version, newest, idle):
            break
        engine_version, idle = newest if idle else engine_version, False
        started.append(rollout)
    return started


def test_at_0_nothing_starts_ahead() -> None:
    rule = RunAhead(0, steps_per_rollout=4, first_rollout=0, first_version=0, total_steps=100)
    assert rule.in_window(3, training=3) and rule.may_start(3, engine_version=8, newest=12, idle=True)
    assert started_ahead(rule, training=3, engine_version=12, idle=True) == []


def test_at_1_the_weights_before_this_training_generate_the_next_rollout() -> None:
    rule = RunAhead(1, steps_per_rollout=4, first_rollout=0, first_version=0, total_steps=16)
    assert started_ahead(rule, training=0, engine_version=0, idle=True) == [1]
    assert rule.staleness(1, version=0) == 1
    assert started_ahead(rule, training=2, engine_version=4, idle=True) == [3]
    assert rule.staleness(3, version=8) == 1
    assert started_ahead(rule, training=3, engine_version=8, idle=True) == []  # the last rollout
    partly_trained = RunAhead(1, 4, 0, 0, total_steps=17)
    assert started_ahead(partly_trained, training=3, engine_version=8, idle=True) == [4]


def test_a_busy_engine_starts_rollouts_while_its_weights_are_new_enough() -> None:
    rule = RunAhead(2, steps_per_rollout=1, first_rollout=0, first_version=0, total_steps=100)
    assert started_ahead(rule, training=5, engine_version=5, idle=True) == [6, 7]
    assert rule.may_start(7, engine_version=5, newest=6, idle=False)  # 2 behind
    assert not rule.may_start(8, engine_version=5, newest=6, idle=False)  # 3 behind, and not interrupted
    assert rule.may_start(8, engine_version=5, newest=6, idle=True)


def test_a_resumed_run_counts_from_its_first_rollout() -> None:
    """Rollout 5 was half trained when the run was interrupted, and starts again; other batch sizes than before have
    changed the number of steps per rollout."""
    rule = RunAhead(1, steps_per_rollout=4, first_rollout=5, first_version=8, total_steps=20)
    assert rule.staleness(5, version=10) == 0  # of the weights that it resumes with
    assert rule.staleness(6, version=10) == 1
    assert rule.staleness(6, version=12) == 0
    assert rule.in_window(7, training=6) and not rule.in_window(8, training=7)


@given(st.integers(0, 4), st.integers(1, 3), st.lists(st.booleans(), min_size=1, max_size=30))
def test_nothing_is_staler_than_allowed_and_no_rollout_is_skipped(
    max_staleness: int, per_rollout: int, idle_at: list[bool]
) -> None:
    """Independently of when the engine is idle."""
    rule = RunAhead(max_staleness, per_rollout, 0, 0, total_steps=len(idle_at) * per_rollout)
    started: list[tuple[int, int]] = []  # rollout, version
    engine_version = -1
    for training, done in enumerate(idle_at):
        newest = training * per_rollout
        if not any(rollout == training for rollout, _ in started):  # needed now, so nothing else is pending
            engine_version = newest
            started.append((training, newest))
        idle = done or not any(rollout > training for rollout, _ in started)
        while rule.in_window(rollout := started[-1][0] + 1, training):
            if not rule.may_start(rollout, engine_version, newest, idle):
                break
            engine_version, idle = newest if idle else engine_version, False
            started.append((rollout, engine_version))
    assert [rollout for rollout, _ in started] == list(range(len(idle_at)))
    assert all(0 <= rule.staleness(rollout, version) <= max_staleness for rollout, version in started)


@given(st.integers(0, 4), st.integers(1, 3), st.integers(0, 5), st.lists(st.booleans(), min_size=1, max_size=30))
def test_until_newer_weights_nothing_is_left_to_start(
    max_staleness: int, per_rollout: int, first: int, idle_at: list[bool]
) -> None:
    """In the tail of a rollout, the next one would exceed the bound: docs/async.md has no flag for it."""
    rule = RunAhead(max_staleness, per_rollout, first, 7, total_steps=10_000)
    last, engine_version = first - 1, -1
    for training, idle in enumerate(idle_at, start=first):
        newest = 7 + (training - first) * per_rollout
        if last < training:
            last, engine_version = training, newest
        while rule.in_window(last + 1, training) and rule.may_start(last + 1, engine_version, newest, idle):
            last, engine_version, idle = last + 1, newest if idle else engine_version, False
        assert not rule.may_start(last + 1, engine_version, newest, idle=False)


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_as_many_rollouts_start_as_allowed(max_staleness: int) -> None:
    rule = RunAhead(max_staleness, 2, 0, 0, total_steps=100)
    assert started_ahead(rule, training=4, engine_version=8, idle=True) == [5, 6, 7][:max_staleness]


def test_metrics_count_tokens_and_completions_by_their_spans() -> None:
    rule = RunAhead(2, steps_per_rollout=4, first_rollout=0, first_version=0, total_steps=100)

    def rollout(*spans: tuple[int, int]) -> Rollout:
        tokens = sum(count for _, count in spans)
        several = list(spans) if len(spans) > 1 else None
        return Rollout(Prompt("a", {}), [1], [2] * tokens, [-1.0] * tokens, "", "stop", spans[0][0], spans=several)

    metrics = rule.metrics(
        5, [rollout((12, 1), (16, 2), (20, 1)), rollout((20, 4)), rollout((16, 0)), rollout((16, 2))]
    )
    assert metrics == {
        "rollout/staleness": (1.0 + 0.0 + 0.0 + 1.0) / 4, "rollout/staleness_max": 2, "rollout/several_weights": 1,
        "rollout/staleness_0_frac": 5 / 10, "rollout/staleness_1_frac": 4 / 10, "rollout/staleness_2_frac": 1 / 10,
    }  # fmt: skip
    one = replace(rollout((20, 1)), weights_version=16, earlier=(TokenSequence([1], [2, 2], None),))
    assert rule.metrics(5, [replace(one, spans=[(20, 1)])]) == {
        "rollout/staleness": 2 / 3, "rollout/staleness_max": 1, "rollout/several_weights": 1,
        "rollout/staleness_0_frac": 1 / 3, "rollout/staleness_1_frac": 2 / 3, "rollout/staleness_2_frac": 0,
    }  # fmt: skip
    assert rule.metrics(5, [replace(one, weights_version=20)])["rollout/several_weights"] == 0
    assert rule.metrics(5, [rollout((20, 0))])["rollout/staleness_0_frac"] == 0  # a completion without tokens
