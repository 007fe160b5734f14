"""Rewards, seconds and lengths of each step, from what each trainer logs.

Seconds count from the first step's beginning to the end of each step, without saving.
"""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

FILES = {"ours": "logging.jsonl", "stock": "logging.jsonl", "trl": "steps.jsonl", "verl": "steps.jsonl"}
VERL = {"reward": "critic/rewards/mean", "length": "response_length/mean", "learning_rate": "actor/lr"}
NAMES = ("reward", "length", "learning_rate")
SWIFT = {"reward": "reward", "length": "completions/mean_length", "learning_rate": "learning_rate"}


def read_steps(arm: str, output: Path) -> dict[str, list[float]]:
    """Return the series `reward`, `length`, `learning_rate` and `seconds`, with one value per step."""
    file = output / FILES[arm]
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    if arm == "verl":
        return _verl([row["data"] for row in rows])
    rows = [row for row in rows if "reward" in row]  # not the summary at the end
    if arm == "trl":
        seconds = [row["seconds"] for row in rows]
    else:
        seconds = [float(row["train_speed(s/it)"]) * int(row["iteration"].split("/")[0]) for row in rows]
    return _series(rows, SWIFT, seconds)


def _verl(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    rows = [row for row in rows if VERL["reward"] in row]
    saving = (row["timing_s/step"] - row.get("timing_s/save_checkpoint", 0.0) for row in rows)
    return _series(rows, VERL, list(accumulate(saving)))


def _series(rows: list[dict[str, Any]], names: dict[str, str], seconds: list[float]) -> dict[str, list[float]]:
    series = {name: [round(float(row[names[name]]), 9) for row in rows] for name in NAMES}
    return series | {"seconds": [round(second, 3) for second in seconds]}
