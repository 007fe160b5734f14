"""The simulated split of GPUs between servers and training."""

from __future__ import annotations

import pytest

from benchmarks.simulate_split import GPUS, RATIOS, SWITCH, SYNC, Phases, table
from tests.paths import REPOSITORY


def test_generation_that_does_not_grow_hides_behind_training() -> None:
    phases = Phases(generation=1.0, growth=0.0)
    assert phases.split(8, 1) == pytest.approx(8 / 7 + SYNC)
    assert phases.best_split(8) == 1


def test_generation_gets_the_share_of_gpus_that_it_has_of_the_step() -> None:
    phases = Phases(generation=3.0, growth=1.0)
    assert phases.best_split(4) == 3
    assert phases.split(4, 3) == pytest.approx(4.0 + SYNC)  # as much work on as many GPUs
    assert phases.colocated() == pytest.approx(4.0 + SWITCH)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("growth", [0.0, 0.25, 0.75, 1.0])
def test_no_other_split_is_faster_and_more_gpus_never_lose(ratio: float, growth: float) -> None:
    phases = Phases(ratio, growth)
    best = [phases.split(gpus, phases.best_split(gpus)) for gpus in GPUS]
    for gpus, time in zip(GPUS, best, strict=True):
        assert time == min(phases.split(gpus, servers) for servers in range(1, gpus))
    assert best == sorted(best, reverse=True)  # each finds the halves of the last one among its splits


def test_the_page_shows_what_is_computed() -> None:
    page = " ".join((REPOSITORY / "docs" / "async.md").read_text().split())
    assert " ".join(table().split()) in page
