"""Verdicts of tests/stress/kill_servers.py and tests/stress/soak.py, on made-up records instead of real processes."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from tests.paths import REPOSITORY
from tests.stress import kill_servers, soak

GOOD = kill_servers.Outcome(
    ids=[("0-1", 0), ("0-1", 1), ("0-2", 0)], tokens=["a", "b", "c"], numbers=[[0.5, 1.0, 0.1]], seconds=1.0
)


@pytest.mark.parametrize(
    ("disturbed", "good"),
    [
        (GOOD, True),
        (replace(GOOD, ids=[("0-1", 0), ("0-1", 0), ("0-2", 0)]), False),  # one repeated, one lost
        (replace(GOOD, ids=GOOD.ids[:2], tokens=GOOD.tokens[:2]), False),
        (replace(GOOD, numbers=[[0.5, 1.001, 0.1]]), False),
        (replace(GOOD, numbers=[[0.5, 1.00001, 0.1]]), True),
    ],
)
def test_a_disturbed_run_must_train_the_same_as_the_undisturbed_run(
    disturbed: kill_servers.Outcome, good: bool
) -> None:
    assert kill_servers.compare_outcomes(disturbed, GOOD)[1] is good


def test_kills_are_planned_in_order_and_depend_only_on_the_seed() -> None:
    planned, same, other = (kill_servers.plan_kills(20, 40, random.Random(seed)) for seed in (3, 3, 4))
    assert planned == same != other
    assert [kill.step for kill in planned] == sorted(kill.step for kill in planned)
    assert all(1 <= kill.step < 40 for kill in planned)
    assert len({kill.phase for kill in planned}) > 3 and len({kill.part for kill in planned}) == 3


def test_growth_leaves_out_the_warm_up() -> None:
    warm_up = [1000 + 10 * step for step in range(100)]
    assert soak.growth([*warm_up, *[2000] * 400], 100) == 0
    leak = [*warm_up, *(2000 + step // 10 for step in range(400))]  # 40 of 2000
    assert soak.growth(leak, 100) > soak.ALLOWED


def test_the_page_shows_the_numbers_in_the_result_files() -> None:
    docs = REPOSITORY / "docs"
    page = (docs / "fault_tolerance.md").read_text()
    report = json.loads((docs / "fault_tolerance_kills.json").read_text())
    kills = [kill_servers.Kill(at=0, **kill) for kill in report["kills"]]
    assert report["good"] and len(kills) == 20 and kill_servers.table(kills) in page
    assert f"{sum(kill.unfinished for kill in kills)} completions had to be generated again" in page
    assert f"Both runs trained {report['result']['trained']} completions" in page
    memory = json.loads((docs / "fault_tolerance_soak.json").read_text())
    for name in ("trainer", "server"):
        [row] = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
        assert f"{100 * memory[name]['growth']:+.2f} %" in row
