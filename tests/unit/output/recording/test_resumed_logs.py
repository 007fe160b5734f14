"""The logs of a run that resumes in its own folder hold every step and every rollout once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.output.recording.unfinished import trim_logs


def write(path: Path, rows: list[dict[str, Any]], end: str = "") -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    steps = [{"loss": float(step), "iteration": f"{step}/10"} for step in range(1, 6)]
    evaluations = [{"eval_reward": 0.5, "iteration": f"{step}/10"} for step in (2, 4)]
    write(tmp_path / "logging.jsonl", [*steps[:2], evaluations[0], *steps[2:4], evaluations[1], steps[4]])
    write(
        tmp_path / "completions.jsonl", [{"rollout": rollout, "gen_step": 2 * rollout} for rollout in (0, 0, 1, 1, 2)]
    )
    trim_logs(tmp_path, steps_done=3, rollouts_done=1)
    assert read(tmp_path / "logging.jsonl") == [*steps[:2], evaluations[0], steps[2]]
    assert [row["rollout"] for row in read(tmp_path / "completions.jsonl")] == [0, 0]


def test_a_line_that_was_cut_off_is_dropped_and_summaries_stay(tmp_path: Path) -> None:
    summary = {"last_model_checkpoint": "checkpoint-3"}
    write(tmp_path / "logging.jsonl", [{"iteration": "3/3"}, summary], end='{"loss": 0.1, "itera')
    trim_logs(tmp_path, steps_done=3, rollouts_done=3)
    assert read(tmp_path / "logging.jsonl") == [{"iteration": "3/3"}, summary]


def test_completions_with_other_ends_of_lines_are_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    rows = [{"rollout": rollout, "completion": "a\u2028b\x85c"} for rollout in (0, 1)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows) + '{"completion": "é')
    path.write_bytes(path.read_bytes()[:-1])  # cut within a character
    trim_logs(tmp_path, steps_done=1, rollouts_done=1)
    assert [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] == rows[:1]


@pytest.mark.parametrize(
    "line",
    ['{"iteration": null}', '{"iteration": 3}', '{"iteration": "x/9"}', "null", "[]", "[" * 10**5, "9" * 5000, "\x00",
     '{"rollout": "x"}', '{"rollout": null}'],
)  # fmt: skip
def test_a_line_that_no_run_writes_is_dropped(tmp_path: Path, line: str) -> None:
    for name, row in (("logging.jsonl", {"iteration": "1/3"}), ("completions.jsonl", {"rollout": 0})):
        write(tmp_path / name, [row], end=f"{line}\n{json.dumps(row)}\n")
    trim_logs(tmp_path, steps_done=1, rollouts_done=1)
    assert {"iteration": "1/3"} in read(tmp_path / "logging.jsonl")
    assert read(tmp_path / "completions.jsonl")[0] == {"rollout": 0}
    assert (line + "\n").encode() not in (tmp_path / ("completions" if "rollout" in line else "logging")).with_suffix(
        ".jsonl"
    ).read_bytes()


def test_logs_without_later_rows_are_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "logging.jsonl"
    write(path, [{"iteration": "1/3"}])
    before = path.stat()
    trim_logs(tmp_path, steps_done=1, rollouts_done=1)
    assert path.stat().st_ino == before.st_ino and path.stat().st_mtime_ns == before.st_mtime_ns
