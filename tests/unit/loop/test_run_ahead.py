"""Which rollout may begin beside the one that is trained, and how stale it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_megatron_grpo.loop.run_ahead import RunAhead


def begun_beside(rule: RunAhead, training: int, engine_version: int, idle: bool) -> list[int]:
    """What is begun while a rollout is trained, as Rollouts does: an engine that has begun one is busy."""
    newest = rule.first_version + (training - rule.first_rollout) * rule.steps_per_rollout
    begun: list[int] = []
    while rule.wants(rollout := training + 1 + len(begun), training):
        if not rule.may_begin(rollout, engine_version, newest, idle):
            break
        engine_version, idle = newest if idle else engine_version, False
        begun.append(rollout)
    return begun


def test_at_0_nothing_is_begun_ahead() -> None:
    rule = RunAhead(0, steps_per_rollout=4, first_rollout=0, first_version=0, steps_in_all=100)
    assert rule.wants(3, training=3) and rule.may_begin(3, engine_version=8, newest=12, idle=True)
    assert begun_beside(rule, training=3, engine_version=12, idle=True) == []


def test_at_1_the_next_one_is_generated_by_the_weights_before_this_training() -> None:
    rule = RunAhead(1, steps_per_rollout=4, first_rollout=0, first_version=0, steps_in_all=16)
    assert begun_beside(rule, training=0, engine_version=0, idle=True) == [1]
    assert rule.staleness(1, version=0) == 1
    assert begun_beside(rule, training=2, engine_version=4, idle=True) == [3]
    assert rule.staleness(3, version=8) == 1
    assert begun_beside(rule, training=3, engine_version=8, idle=True) == []  # the last one
    assert begun_beside(RunAhead(1, 4, 0, 0, 17), training=3, engine_version=8, idle=True) == [4]  # begun, not finished


def test_a_busy_engine_begins_with_its_weights_while_they_are_new_enough() -> None:
    rule = RunAhead(2, steps_per_rollout=1, first_rollout=0, first_version=0, steps_in_all=100)
    assert begun_beside(rule, training=5, engine_version=5, idle=True) == [6, 7]
    assert rule.may_begin(7, engine_version=5, newest=6, idle=False)  # 2 behind
    assert not rule.may_begin(8, engine_version=5, newest=6, idle=False)  # 3 behind, and not interrupted
    assert rule.may_begin(8, engine_version=5, newest=6, idle=True)


def test_a_resumed_run_counts_from_where_it_goes_on() -> None:
    """Rollout 5 was half trained when the run was interrupted, and begins anew; other batch sizes than before have
    given the steps another meaning."""
    rule = RunAhead(1, steps_per_rollout=4, first_rollout=5, first_version=8, steps_in_all=20)
    assert rule.staleness(5, version=10) == 0  # of the weights that it goes on with
    assert rule.staleness(6, version=10) == 1
    assert rule.staleness(6, version=12) == 0
    assert rule.wants(7, training=6) and not rule.wants(8, training=7)


@given(st.integers(0, 4), st.integers(1, 3), st.lists(st.booleans(), min_size=1, max_size=30))
def test_nothing_is_staler_than_allowed_and_no_rollout_is_left_out(
    max_staleness: int, per_rollout: int, idle_at: list[bool]
) -> None:
    """Whenever the engine happens to be idle."""
    rule = RunAhead(max_staleness, per_rollout, 0, 0, steps_in_all=len(idle_at) * per_rollout)
    begun: list[tuple[int, int]] = []  # rollout, version
    engine_version = -1
    for training, done in enumerate(idle_at):
        newest = training * per_rollout
        if not any(rollout == training for rollout, _ in begun):  # is wanted now, so nothing else is there
            engine_version = newest
            begun.append((training, newest))
        idle = done or not any(rollout > training for rollout, _ in begun)
        while rule.wants(rollout := begun[-1][0] + 1, training):
            if not rule.may_begin(rollout, engine_version, newest, idle):
                break
            engine_version, idle = newest if idle else engine_version, False
            begun.append((rollout, engine_version))
    assert [rollout for rollout, _ in begun] == list(range(len(idle_at)))
    assert all(0 <= rule.staleness(rollout, version) <= max_staleness for rollout, version in begun)


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_as_many_as_allowed_lie_ready(max_staleness: int) -> None:
    rule = RunAhead(max_staleness, 2, 0, 0, steps_in_all=100)
    assert begun_beside(rule, training=4, engine_version=8, idle=True) == [5, 6, 7][:max_staleness]
