"""Verdicts of the scripts in tests/stress, on made-up records instead of real processes."""

from __future__ import annotations

import json
import random
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.paths import REPOSITORY
from tests.stress import faults, kill_servers, soak
from tests.stress.fault_kinds import KINDS
from tests.stress.fault_runs import Completions, Run, account, dumped
from tests.stress.processes import digest

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
    details = (REPOSITORY / "benchmarks" / "faults.md").read_text()
    report = json.loads((docs / "fault_tolerance_kills.json").read_text())
    kills = [kill_servers.Kill(at=0, **kill) for kill in report["kills"]]
    assert report["good"] and len(kills) == 20 and kill_servers.table(kills) in details
    words = " ".join(page.split())
    assert f"{sum(kill.unfinished for kill in kills)} completions had to be generated again" in words
    assert f"Both runs trained {report['result']['trained']} completions" in words
    memory = json.loads((docs / "fault_tolerance_soak.json").read_text())
    for name in ("trainer", "server"):
        [row] = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
        assert f"{100 * memory[name]['growth']:+.2f} %" in row


def test_faults_are_drawn_from_every_kind_and_depend_only_on_the_seed() -> None:
    planned, same, other = (faults.plan(50, KINDS, random.Random(seed)) for seed in (3, 3, 4))
    assert planned == same != other and len(planned) == 50
    for kind in KINDS:
        drawn = [fault for fault in planned if fault.kind == kind.name]
        assert len(drawn) >= 2 and {fault.detail for fault in drawn} <= set(kind.details)
        assert all(fault.phase in kind.phases for fault in drawn)
    needs_servers = [next(kind for kind in KINDS if kind.name == fault.kind).needs_servers for fault in planned]
    assert planned[0].kind == "SIGTERM to a rank" and needs_servers[1:] == sorted(needs_servers[1:], reverse=True)


def recorded_run(folder: Path, first: int, completions: dict[int, list[int]], trained: int) -> Run:
    """Return a run that recorded these rollouts, each of completions of one token, and trained some of them."""
    events = [{"rollout": rollout, "complete": [digest([1, token]) for token in tokens]}
              for rollout, tokens in completions.items()]  # fmt: skip
    steps = [{"step": step + 1, "trained": event["complete"]} for step, event in enumerate(events[:trained])]
    path = folder / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in [*events, *steps]))
    process = subprocess.Popen(["true"], text=True)
    process.wait()
    return Run(folder, folder / "dump", first, process, folder / "log", path)


def write_dump(folder: Path, completions: dict[int, list[int]]) -> None:
    (folder / "dump").mkdir()
    for rollout, tokens in completions.items():
        rows = [json.dumps({"prompt_ids": [1], "completion_ids": [token]}) for token in tokens]
        (folder / "dump" / f"rollout-{rollout:06}.jsonl").write_text("\n".join(rows))


@pytest.mark.parametrize(
    ("in_dump", "trained", "continued_from", "expected"),
    [
        ({4: [7, 8], 5: [9, 9]}, 2, 6, Completions(again=0, lost=0)),
        ({4: [7, 8], 5: [9, 9]}, 1, 5, Completions(again=2, lost=0)),  # the step in flight
        ({4: [7, 8]}, 2, 6, Completions(again=0, lost=2)),  # trained, but not in the dump
        ({4: [7, 6], 5: [9, 9]}, 2, 6, Completions(again=0, lost=2)),  # others in the dump
        ({4: [7, 8], 5: [9, 9]}, 1, 6, Completions(again=0, lost=2)),  # in the checkpoint, but not trained
    ],
)
def test_a_completion_is_lost_unless_trained_and_dumped_or_made_again(
    tmp_path: Path, in_dump: dict[int, list[int]], trained: int, continued_from: int, expected: Completions
) -> None:
    write_dump(tmp_path, in_dump)
    run = recorded_run(tmp_path, 4, {4: [7, 8], 5: [9, 9]}, trained)
    assert account(run, continued_from, dumped(run.dump)) == expected


def test_the_reason_is_the_line_of_the_log_that_states_it() -> None:
    [kind] = [kind for kind in KINDS if kind.name == "full disk of checkpoints"]
    log = "INFO no spaces\nNoSpace: no space: /a/b-1/checkpoint-2 needs 5 MB\nlast line\n"
    assert faults.reason_in(log, kind) == "no space: checkpoint-2 needs 5 MB"
    assert faults.reason_in("last line\n", kind) == ""


def test_the_page_shows_the_faults_in_the_result_file() -> None:
    docs = REPOSITORY / "docs"
    page, report = (
        (docs / "fault_tolerance.md").read_text(),
        json.loads((docs / "fault_tolerance_faults.json").read_text()),
    )
    outcomes = [faults.Outcome(**fault) for fault in report["faults"]]
    assert faults.summary(outcomes) in page
    assert faults.table(outcomes) in (REPOSITORY / "benchmarks" / "faults.md").read_text()
    result, bad = report["result"], [outcome for outcome in outcomes if not outcome.good]
    assert report["good"] and not bad and sum(outcome.lost for outcome in outcomes) == 0
    words = " ".join(page.split())
    assert f"trained {result['completions']} completions in {result['steps']} steps" in words
    again = sum(outcome.generated_again for outcome in outcomes)
    assert f"{len(outcomes)} faults hit" in words and f"{again} completions were generated again" in words
    assert result["steps that trained the completions in the dump"] == result["steps"]
    assert result["steps that trained the completions of the undisturbed run"] == result["steps"]
