"""Mean and range over the seeds of a trainer, in windows of steps. Pure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness.results import ARMS

FILES = "benchmarks/*/parts/learn-*.json"
WINDOW = 20  # steps
Run = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """One window of the same steps in all runs of a trainer."""

    step: int  # the last of the window
    seconds: float  # from the first step's beginning to the window's end, mean over seeds
    mean: float  # reward
    low: float
    high: float


def read_runs(repository: Path) -> list[Run]:
    return [json.loads(file.read_text()) for file in sorted(repository.glob(FILES))]


def is_complete(run: Run) -> bool:
    return run["exit_code"] == 0 and bool(run["after"]) and len(run["reward"]) == run["settings"]["steps"]


def by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the complete runs of each trainer; raise ValueError if they do not have the same settings."""
    complete = [run for run in runs if is_complete(run)]
    settings = {json.dumps(run["settings"], sort_keys=True) for run in complete}
    if len(settings) > 1:
        raise ValueError(f"learn: runs with different settings cannot be compared: {' and '.join(sorted(settings))}")
    return {arm: [run for run in complete if run["arm"] == arm] for arm in ARMS}


def band(runs: Sequence[Run]) -> list[Point]:
    """Return the points of a trainer's curve; steps after the last whole window are left out."""
    points = []
    for end in range(WINDOW, min((len(run["reward"]) for run in runs), default=0) + 1, WINDOW):
        rewards = [statistics.fmean(run["reward"][end - WINDOW : end]) for run in runs]
        seconds = statistics.fmean(run["seconds"][end - 1] for run in runs)
        points.append(Point(end, seconds, statistics.fmean(rewards), min(rewards), max(rewards)))
    return points


def steps_below(bands: Mapping[str, Sequence[Point]]) -> list[int]:
    """Return the windows in which this package's mean is below the lowest seed of every other trainer."""
    others = [points for arm, points in bands.items() if arm != "ours" and points]
    return [
        point.step
        for place, point in enumerate(bands["ours"])
        if (lows := [points[place].low for points in others]) and point.mean < min(lows)
    ]


def seconds_per_step(run: Run) -> float:
    """Return the median time of a step, without the first, which warms up."""
    seconds: list[float] = run["seconds"]
    return statistics.median(later - earlier for earlier, later in pairwise(seconds))
