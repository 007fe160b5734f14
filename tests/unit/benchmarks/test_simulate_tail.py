"""The simulation of tails: its arithmetic by hand, and what docs/async.md concludes from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.simulate_tail import FLAT, GROWING, Case, Decode, Run, Server, tail_of
from tests.paths import REPOSITORY

SECOND = Decode(1.0, 0.0)  # of each step
SMALL = Case(prompts=2, completions=2, slots=4, lengths="constant:10", decode=SECOND, rollouts=3)


def test_slots_are_refilled_and_a_step_lasts_longer_with_more_completions() -> None:
    server = Server(2, Decode(1.0, 0.5))
    server.start(0, [3, 1, 3])
    assert len(server.waiting) == 1 and server.missing[0] == 3
    server.finish_next()  # one step of 2 s
    assert server.seconds == 2 and not server.waiting
    server.finish_next()  # two more, with the third completion in the free slot
    assert server.seconds == 6 and server.missing[0] == 1
    server.finish_next()  # the last step, of 1.5 s
    assert server.seconds == 7.5 and server.is_idle and server.used == 2 * 6 + 1.5


def test_time_passes_also_within_a_completion_and_after_the_last_one() -> None:
    server = Server(2, SECOND)
    server.start(0, [4])
    server.run(2.5)
    assert server.seconds == 2.5 and server.missing[0] == 1
    server.start(1, [1])
    server.run(7.5)
    assert server.seconds == 10 and server.is_idle and server.used == pytest.approx(5)


def test_completions_that_are_needed_first_wait_before_all_others() -> None:
    server = Server(1, SECOND)
    server.start(0, [5, 5])
    server.start(1, [1, 2], first=True)
    assert list(server.waiting) == [(1, 1), (1, 2), (0, 5)]


def test_the_tail_begins_when_the_last_completion_has_started() -> None:
    one = tail_of(replace(SMALL, slots=3))  # 3 completions from 0 to 10 s, the fourth from 10 to 20 s
    assert (one.seconds, one.tail, one.busy) == (20, 10, pytest.approx(1 / 3))


def test_generation_and_training_overlap_at_1_and_alternate_at_0() -> None:
    """A rollout takes 10 s, training 4 s, a sync 1 s; the first weights need none."""
    apart, ahead = (Run(replace(SMALL, max_staleness=n, train_seconds=4)).result() for n in (0, 1))
    assert apart.seconds * 3 == pytest.approx(10 + 4 + 2 * (1 + 10 + 4)) and apart.staleness == 0
    assert ahead.seconds * 3 == pytest.approx(10 + 10 + 1 + 10 + 4)  # trained: 10-14, 20-24 after a sync, 31-35 s
    assert ahead.staleness == pytest.approx(2 / 3) and ahead.most_stale == 1


def test_a_larger_rollout_for_two_steps_has_one_tail() -> None:
    """Four completions of 10 s for each step run at the same time; training takes 4 s for each."""
    case = replace(SMALL, max_staleness=0, train_seconds=4, rollouts=1, slots=8)
    one, two = (Run(replace(case, steps=steps)).result() for steps in (1, 2))
    assert (one.seconds, two.seconds) == (10 + 4, 10 / 2 + 4)
    assert (one.staleness, one.most_stale, two.staleness, two.most_stale) == (0, 0, 0.5, 1)


def test_a_sync_waits_for_groups_that_were_started_in_a_tail() -> None:
    """One of two groups; it starts at once, because nothing waits, and ends with the rollout before it."""
    case = replace(SMALL, slots=8, groups_ahead=1)
    result = Run(case).result()
    # rollout 0 and half of 1; the rest of 1 and, in its tail, half of 2; a sync, and the rest of 2
    assert result.seconds * 3 == pytest.approx(10 + 10 + 1 + 10)
    assert result.staleness == pytest.approx((4 * 0 + 4 * 1 + 2 * 2 + 2 * 1) / 12) and result.most_stale == 2


def test_in_flight_a_sync_pauses_the_server_and_rollouts_overlap() -> None:
    case = replace(SMALL, slots=8, in_flight=True)
    result = Run(case).result()
    assert result.seconds * 3 == pytest.approx(10 + 1 + 1 + 10)  # rollouts 0 and 1; two syncs; rollout 2
    assert result.staleness == pytest.approx(2 / 3) and result.most_stale == 1
    assert Run(replace(case, in_flight=False)).result().seconds * 3 == pytest.approx(10 + 10 + 1 + 10)


@pytest.mark.parametrize("alone", [True, False])
def test_draws_are_generated_before_or_next_to_the_following_rollout(alone: bool) -> None:
    case = replace(SMALL, uniform=0.5, most_draws=1, draws_alone=alone, rollouts=2, slots=8)
    assert Run(case).result().seconds * 2 == pytest.approx(10 + 10 + 10 + 1 + 10 if alone else 10 + 10 + 1 + 10)


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_spare_groups_leave_no_round_if_they_are_enough(spare: int) -> None:
    case = replace(SMALL, uniform=0.5, most_draws=1, spare=spare, rollouts=1, slots=8, max_staleness=0)
    assert Run(case).result().seconds == (10 if spare else 20)


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_the_bound_leaves_nothing_to_start_in_tails_after_the_first(max_staleness: int) -> None:
    assert Run(Case(max_staleness=max_staleness, rollouts=9)).result().within_bound == {0}


@pytest.mark.parametrize("decode", [GROWING, FLAT])
@pytest.mark.parametrize("groups", [8, 32, 64])
def test_groups_in_tails_save_no_time_even_with_a_larger_bound(decode: Decode, groups: int) -> None:
    for train in (0.0, 15.0, 60.0):
        case = Case(decode=decode, train_seconds=train, rollouts=9)
        assert Run(replace(case, groups_ahead=groups)).result().seconds > 0.99 * Run(case).result().seconds


def test_the_page_shows_what_is_computed() -> None:
    """The table is that of benchmarks/bench_waits.py, without what is measured."""
    page = " ".join((REPOSITORY / "docs" / "async.md").read_text().split())
    for decode in (GROWING, FLAT):
        one = tail_of(Case(decode=decode))
        assert (
            f"{one.seconds:.1f} s" in page and f"{one.tail:.1f} s of it in the tail with {one.busy * 100:.0f} %" in page
        )
