"""Verdicts of benchmarks/long_run.py on made-up series, and what it reads of processes and files."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import long_run
from benchmarks.harness.drift import FIGURES, Windows, judged
from benchmarks.harness.long_run_page import text_of, with_long_runs
from benchmarks.harness.other_pages import with_table
from benchmarks.harness.process_tree import read_tree
from tests.paths import REPOSITORY
from tests.unit.output.report.example_run import make_run, step_row, write_log

STEPS = 2500
NOISE = random.Random(0)


def leak(share: float) -> Callable[[int], float]:
    """Return a figure that grows by a share from step 200 on, with noise of 1 %."""
    return lambda step: (1 + share * max(step - 200, 0) / (STEPS - 200)) * NOISE.gauss(4.0, 0.04)


@pytest.mark.parametrize(
    ("name", "value", "passes"),
    [
        ("host memory", leak(0.0), True),
        ("host memory", leak(0.03), False),
        ("host memory", lambda step: 4.0 if step > 200 else 2.0, True),  # the warm-up
        ("host memory", lambda step: 4.0 + (step % 200 == 0), True),  # while it saves
        ("host memory", leak(-0.1), True),
        ("open files", lambda step: 90 + 20 * (step % 200 == 0), True),
        ("open files", lambda step: 90 + step // 2000, False),
        ("step", lambda step: NOISE.gauss(0.3, 0.03) + 2.0 * (step % 250 == 1), True),
        ("step", lambda step: NOISE.gauss(0.3, 0.03) * (1 + 0.1 * step / STEPS), False),
    ],
)
def test_growth_is_seen_and_noise_is_not(name: str, value: Callable[[int], float], passes: bool) -> None:
    figure = judged(FIGURES[name], Windows(STEPS), ((step, value(step)) for step in range(1, STEPS + 1)))
    assert figure["passed"] is passes
    assert len(figure["series"]) == 250


def test_windows_are_the_same_shares_of_every_run() -> None:
    assert Windows(STEPS).as_steps() == {"early": [201, 700], "late": [2001, 2500]}
    assert Windows(12).as_steps() == {"early": [2, 3], "late": [11, 12]}
    missing = judged(FIGURES["GPU memory"], Windows(12), [])
    assert missing["passed"] is None and missing["series"] == [None] * 12


def test_an_open_file_and_its_process_count() -> None:
    before = read_tree(os.getpid())
    with Path(os.devnull).open():
        after = read_tree(os.getpid())
    assert after["open files"] == before["open files"] + 1
    assert after["processes"] >= 1 and after["threads"] >= 1 and after["host memory"] > 0.01


def rows_of_a_run() -> list[dict[str, Any]]:
    """Return four steps of 2 s and an evaluation of 3 s after the second, which takes 5 s to save."""
    seconds = {1: 2.0, 2: 4.0, 3: 14.0, 4: 16.0}
    rows = [step_row(step, 4) | {"train_speed(s/it)": end / step} for step, end in seconds.items()]
    evaluation = {"eval_reward": 0.5, "iteration": "2/4", "train_speed(s/it)": 7.0 / 2}
    return [{"eval_reward": 0.1, "iteration": "0/4", "train_speed(s/it)": 0.0}, *rows[:2], evaluation, *rows[2:]]


def test_a_log_is_read_while_it_grows(tmp_path: Path) -> None:
    record = long_run.Record(tmp_path, steps=4, save_every=2)
    record.read(os.getpid())
    rows = rows_of_a_run()
    write_log(tmp_path, rows[:3])
    with (tmp_path / "logging.jsonl").open("a") as log:
        line = json.dumps(rows[3]) + "\n"
        log.write(line[:20])
        log.flush()
        record.read(os.getpid())
        assert record.result()["steps_done"] == 2
        log.write(line[20:])
    write_log(tmp_path, [*rows[4:], {"last_model_checkpoint": "checkpoint-4"}])
    record.read(os.getpid())
    result = record.result()
    assert result["steps_done"] == 4 and result["evaluated_reward"] == [0.1, 0.5]
    assert result["evaluations"] == [3.0] and result["saves"] == [7.0]  # the save and the step after it
    assert result["figures"]["step"]["series"] == [None, 2.0, 10.0, 2.0]
    assert result["figures"]["train"]["series"] == [0.8] * 4
    assert result["figures"]["threads"]["series"][3] >= 1


def test_files_of_a_run_must_be_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", global_batch_size=2)  # six steps, twelve completions
    assert all(file["whole"] for file in long_run.files_of(run, steps=6).values())
    with (run / "completions.jsonl").open("r+") as file:
        file.seek(100)
        file.write("\n")
    write_log(run, [step_row(8, 10)])
    files = long_run.files_of(run, steps=6)
    assert not files["log"]["whole"] and not files["completions"]["whole"] and files["report"]["whole"]


def test_sums_are_right(tmp_path: Path) -> None:
    long_run.write_sums(tmp_path / "sums.jsonl", rows=20, seed=1)
    for line in (tmp_path / "sums.jsonl").read_text().splitlines():
        row = json.loads(line)
        [message] = row["messages"]
        sum_ = message["content"].partition(": ")[2].partition(" =")[0]
        assert int(row["solution"]) == sum(map(int, sum_.split(" + ")))


def test_the_page_shows_the_results() -> None:
    path, marks, text = with_long_runs(REPOSITORY)
    page = (REPOSITORY / path).read_text()
    assert page == with_table(page, marks, text), "run scripts/fix"
    figures = {
        name: judged(figure, Windows(STEPS), ((step, 1.0 + step / 1e6) for step in range(1, STEPS + 1)))
        for name, figure in FIGURES.items()
    }
    file = {"bytes": 3_000_000, "seconds": 0.5, "rows": 2512}
    run = {"arm": "full", "steps": STEPS, "device": "NVIDIA H200", "windows": Windows(STEPS).as_steps(),
           "seconds": 900.0, "evaluate_every": 250, "save_every": 200, "figures": figures, "evaluations": [1.5],
           "saves": [2.5], "report": file, "log": file, "completions": file}  # fmt: skip
    shown = text_of([run, run | {"arm": "lora"}])
    assert "2,500 steps in one run on one H200" in shown and "steps 201 to 700 and of steps 2,001 to 2,500" in shown
    assert "| host memory | 1.000 GiB | 1.002 GiB | +0.18 % | 1.000 GiB |" in shown
    assert "| open files | 1 | 1 | +0 |" in shown and "| full | 15.0 minutes | 1.5 s | 2.5 s | 3.0 MB" in shown
