"""Forecasts of benchmarks/h200/parts/forecast-eight.json next to what was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.markdown import table
from benchmarks.harness.node.figures import Forecast
from benchmarks.harness.results import Measured, Run

FORECASTS = Path("benchmarks/h200/parts/forecast-eight.json")
PEAK_BOUND, TIME_BOUND = 0.05, 0.2  # the goals
_CARD_WITH_RESULTS = "H200-141G"


@dataclass(frozen=True)
class Compared:
    forecast: Forecast
    measured: Measured

    @property
    def peak_ratio(self) -> float:
        """Return the forecast memory of the train phase by the measured one."""
        return self.forecast.train_in_pytorch_gb / self.measured.peak_gb

    @property
    def is_of_step(self) -> bool:
        """Return True if the whole step was forecast, otherwise the train phase alone."""
        return self.measured.run.kind == "step" and self.forecast.generation_seconds is not None

    @property
    def seconds(self) -> float:
        return self.measured.median if self.is_of_step else self.measured.train_median

    @property
    def time_ratio(self) -> float:
        return self.forecast.seconds / self.seconds

    @property
    def is_near(self) -> bool:
        return abs(self.peak_ratio - 1) <= PEAK_BOUND and abs(self.time_ratio - 1) <= TIME_BOUND


def read_forecasts(repository: Path, part: str) -> list[Forecast]:
    """Return forecasts of "cases", or of runs that were "measured" on two and four GPUs."""
    return [Forecast(**values) for values in json.loads((repository / FORECASTS).read_text())[part]]


def compared(forecasts: Sequence[Forecast], results: Path) -> list[Compared]:
    """Return each forecast that a file of the folder has the measurement of, once."""
    found = {}
    for one in forecasts:
        file = results / f"{one.name}.json"
        if one.card != _CARD_WITH_RESULTS or not file.exists():
            continue
        measured = Run.read(file).measured("ours", one.setting)
        if measured.steps:
            found[one.name, one.setting] = Compared(one, measured)
    return list(found.values())


def comparison(rows: Sequence[Compared]) -> str:
    return table(
        {
            "run": lambda row: row.forecast.name,
            "setting": lambda row: row.forecast.setting,
            "GPUs": lambda row: str(row.forecast.ranks),
            "peak GB, forecast": lambda row: f"{row.forecast.train_in_pytorch_gb:.1f}",
            "measured": lambda row: f"{row.measured.peak_gb:.1f}",
            "off by": lambda row: _percent(row.peak_ratio),
            "time of": lambda row: "step" if row.is_of_step else "train phase",
            "forecast": lambda row: f"{row.forecast.seconds:.2f} s",
            "measured time": lambda row: f"{row.seconds:.2f} s",
            "off by so much": lambda row: _percent(row.time_ratio),
        },
        rows,
    )


def forecast_table(forecasts: Sequence[Forecast]) -> str:
    return table(
        {
            "case": lambda row: row.name,
            "setting": lambda row: row.setting,
            "trainer's ranks": lambda row: str(row.ranks),
            "GPU": lambda row: row.card,
            "weight sync GB": lambda row: _optional(row.weight_sync_gb),
            "generation GB": lambda row: _optional(row.generation_gb),
            "train GB": lambda row: f"{row.train_gb:.1f}",
            "fits": lambda row: "yes" if row.fits else "**no**",
            "train phase": lambda row: f"{row.train_seconds:.1f} s",
            "generation": lambda row: _optional(row.generation_seconds, " s"),
        },
        forecasts,
    )


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.0f}%"


def _optional(number: float | None, unit: str = "") -> str:
    return "" if number is None else f"{number:.1f}{unit}"
