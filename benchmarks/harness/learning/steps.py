"""Rewards, seconds and lengths of each step, from what each trainer logs, and the weights that it saved.

Seconds count from the first step's beginning to the end of each step, without saving.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import or_
from pathlib import Path
from typing import Any

FILES = {"ours": "logging.jsonl", "stock": "logging.jsonl", "trl": "steps.jsonl", "verl": "steps.jsonl"}
VERL = {"reward": "critic/rewards/mean", "length": "response_length/mean", "learning_rate": "actor/lr"}
NAMES = ("reward", "length", "learning_rate")
SWIFT = {"reward": "reward", "length": "completions/mean_length", "learning_rate": "learning_rate"}
CHECKPOINT = re.compile(r"(?:checkpoint-|global_step_)(\d+)")


def checkpoints(output: Path) -> dict[int, Path]:
    """Return the folders with weights that a trainer saved, by their steps, in order."""
    folders = {file.parent.relative_to(output) for file in output.rglob("*.safetensors")}
    steps = {int(found[1]): output / folder for folder in folders if (found := CHECKPOINT.search(str(folder)))}
    return dict(sorted(steps.items()))


def read_steps(arm: str, output: Path, save_every: int) -> dict[str, list[float]]:
    """Return the series `reward`, `length`, `learning_rate` and `seconds`, with one value per step."""
    file = output / FILES[arm]
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    if arm == "verl":
        return _verl([row["data"] for row in rows])
    rows = rows_of_steps(rows)
    if arm == "trl":
        ends = [row["seconds"] for row in rows]
    else:
        ends = [float(row["train_speed(s/it)"]) * int(row["iteration"].split("/")[0]) for row in rows]
    return _series(rows, SWIFT, without_saving(ends, save_every))


def rows_of_steps(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of training steps. Further steps of a rollout have what was logged when it was generated."""
    steps = (row for row in rows if "learning_rate" in row)  # not evaluations, nor the summary at the end
    return list(accumulate(steps, or_))


def without_saving(ends: Sequence[float], save_every: int) -> list[float]:
    """Count a step that begins with saving, after the log of the step before it, as the median step."""
    seconds = [end - begin for begin, end in pairwise([0.0, *ends])]
    saving = range(save_every, len(seconds), save_every)
    others = [second for place, second in enumerate(seconds) if place not in saving]
    return list(accumulate(statistics.median(others) if place in saving else second
                           for place, second in enumerate(seconds)))  # fmt: skip


def _verl(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    rows = [row for row in rows if VERL["reward"] in row]
    seconds = (row["timing_s/step"] - row.get("timing_s/save_checkpoint", 0.0) for row in rows)
    return _series(rows, VERL, list(accumulate(seconds)))


def _series(rows: list[dict[str, Any]], names: dict[str, str], seconds: list[float]) -> dict[str, list[float]]:
    series = {name: [round(float(row[names[name]]), 9) for row in rows] for name in NAMES}
    return series | {"seconds": [round(second, 3) for second in seconds]}
