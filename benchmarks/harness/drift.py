"""Series of a long run, and how far its last steps have drifted from early ones."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

POINTS = 250  # of a series, at most
WARM_UP, WINDOW = 0.08, 0.2  # shares of the steps
Series = list[float | None]  # one value per point; None: there was no reading


@dataclass(frozen=True)
class Figure:
    """A figure that is read many times; it fails if it grows by more than its limit."""

    unit: str
    limit: float | None = None  # a share, or a number if it counts; None: it is only shown
    is_count: bool = False


FIGURES = {
    "host memory": Figure("GiB", 0.02),
    "files in memory": Figure("GiB"),
    "GPU memory": Figure("GiB", 0.02),
    "allocated by torch": Figure("GiB", 0.02),
    "reserved by torch": Figure("GiB", 0.02),
    "open files": Figure("files", 0, is_count=True),
    "threads": Figure("threads", 0, is_count=True),
    "processes": Figure("processes", 0, is_count=True),
    "step": Figure("s", 0.05),
    "generation": Figure("s"),
    "train": Figure("s"),
    "weight sync": Figure("s"),
    "sync check": Figure("s"),
    "longest completion": Figure("tokens"),
    "output folder": Figure("GiB"),
}


@dataclass(frozen=True)
class Windows:
    """The steps that are compared, of a run of 2,500: 201 to 700, before which it warms up, and 2,001 to 2,500."""

    steps: int

    @property
    def steps_per_point(self) -> int:
        return -(-self.steps // POINTS)

    def as_steps(self) -> dict[str, list[int]]:
        """Return the first and the last step of each window."""
        points = -(-self.steps // self.steps_per_point)
        first, size = self._places(points)
        ends = {"early": (first, first + size), "late": (points - size, points)}
        return {
            name: [begin * self.steps_per_point + 1, min(end * self.steps_per_point, self.steps)]
            for name, (begin, end) in ends.items()
        }

    def series(self, readings: Iterable[tuple[int, float]]) -> Series:
        """Return the medians of the readings, each with its step, in the steps of every point."""
        points = defaultdict[int, list[float]](list)
        for step, value in readings:
            points[(step - 1) // self.steps_per_point].append(value)
        count = -(-self.steps // self.steps_per_point)
        return [round(statistics.median(points[i]), 6) if i in points else None for i in range(count)]

    def compared(self, series: Series) -> tuple[float, float] | None:
        """Return the medians of the early and of the last steps; None if one of them has no reading."""
        first, size = self._places(len(series))
        parts = [[value for value in part if value is not None]
                 for part in (series[first : first + size], series[-size:])]  # fmt: skip
        return (statistics.median(parts[0]), statistics.median(parts[1])) if all(parts) else None

    def _places(self, points: int) -> tuple[int, int]:
        return round(WARM_UP * points), max(round(WINDOW * points), 1)


def judged(figure: Figure, windows: Windows, readings: Iterable[tuple[int, float]]) -> dict[str, Any]:
    """Return the series of a figure with its drift, as the JSON of a run has it; no reading, no verdict."""
    series = windows.series(readings)
    result: dict[str, Any] = {"unit": figure.unit, "limit": figure.limit, "early": None, "late": None, "drift": None,
                              "passed": None, "series": series}  # fmt: skip
    if (compared := windows.compared(series)) is not None:
        early, late = compared
        drift = round(late - early) if figure.is_count else late / early - 1 if early else 0.0
        result |= {"early": early, "late": late, "drift": round(drift, 5)}
        if figure.limit is not None:
            result["passed"] = drift <= figure.limit
    return result
