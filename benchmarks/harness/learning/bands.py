"""Mean and range over the seeds of a trainer, in windows of steps and where weights were saved. Pure."""

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
TIMED_FILES = "benchmarks/*/parts/learning-time-*.json"
WINDOW = 20  # steps
ENOUGH = 0.8  # of the steps: a timed run that its limit ends afterwards counts
Run = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """A value of the same steps in all runs of a trainer."""

    step: int  # the last of the window
    seconds: float | None  # from the first step's beginning to that step's end; None: the trainer was not timed
    mean: float
    low: float
    high: float


def read_runs(repository: Path, files: str = FILES) -> list[Run]:
    return [json.loads(file.read_text()) for file in sorted(repository.glob(files))]


def is_trained(run: Run) -> bool:
    steps: int = run["settings"]["steps"]
    return run["exit_code"] == 0 and len(run["reward"]) == steps


def is_complete(run: Run) -> bool:
    """Return whether a run was trained and its last weights scored."""
    return is_trained(run) and bool(run["held_out"]) and run["held_out"][-1]["step"] == run["settings"]["steps"]


def is_timed(run: Run) -> bool:
    return run["exit_code"] in (0, None) and len(run["seconds"]) >= ENOUGH * run["settings"]["steps"]


def by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the trained runs of each trainer by seed; raise ValueError if they cannot be compared."""
    trained = sorted((run for run in runs if is_trained(run)), key=lambda run: run["seed"])
    settings = {json.dumps(run["settings"], sort_keys=True) for run in trained}
    if len(settings) > 1:
        raise ValueError(f"learn: runs with different settings cannot be compared: {' and '.join(sorted(settings))}")
    arms = {arm: [run for run in trained if run["arm"] == arm] for arm in ARMS}
    for arm, of_arm in arms.items():
        seeds = [run["seed"] for run in of_arm]
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"learn: {FILES} has a seed of {arm} twice, among {seeds}; keep one of the files")
    return arms


def rewards(runs: Sequence[Run], of_step: float | None) -> list[Point]:
    """Return the mean reward of each window; steps after the last whole window are left out.

    `of_step` are the seconds of a step of that trainer, if it was timed.
    """
    ends = range(WINDOW, min((len(run["reward"]) for run in runs), default=0) + 1, WINDOW)
    return [_point(end, of_step, [statistics.fmean(run["reward"][end - WINDOW : end]) for run in runs]) for end in ends]


def accuracies(runs: Sequence[Run], of_step: float | None) -> list[Point]:
    """Return the held-out accuracy before training and of all weights that were saved, of the runs that have it."""
    scored = [run["held_out"] for run in runs if run["held_out"]]
    steps = [point["step"] for point in scored[0]] if scored else []
    return [_point(step, of_step, [held[place]["accuracy"] for held in scored]) for place, step in enumerate(steps)]


def _point(step: int, of_step: float | None, values: Sequence[float]) -> Point:
    seconds = None if of_step is None else step * of_step
    return Point(step, seconds, statistics.fmean(values), min(values), max(values))


def steps_below(bands: Mapping[str, Sequence[Point]]) -> list[int]:
    """Return the windows in which this package's mean is below the lowest seed of every other trainer."""
    others = [points for arm, points in bands.items() if arm != "ours" and points]
    return [
        point.step
        for place, point in enumerate(bands["ours"])
        if (lows := [points[place].low for points in others]) and point.mean < min(lows)
    ]


def seconds_per_step(runs: Sequence[Run], arm: str) -> list[float]:
    """Return the median time of a step of each timed run of a trainer, without the first step, which warms up."""
    return [
        statistics.median(later - earlier for earlier, later in pairwise(run["seconds"]))
        for run in runs
        if run["arm"] == arm and is_timed(run)
    ]
