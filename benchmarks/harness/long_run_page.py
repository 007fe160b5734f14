"""The section of docs/fault_tolerance.md about long runs, from the JSON files of benchmarks/long_run.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from .drift import FIGURES
from .markdown import table

FILES = "benchmarks/h200/parts/long-run-*.json"
PAGE = Path("docs/fault_tolerance.md")
MARKS = ("<!-- long run, by benchmarks/bench.py report -->\n", "<!-- end of long run -->\n")
Run = dict[str, Any]


def with_long_runs(repository: Path) -> tuple[Path, tuple[str, str], str]:
    """Return the page, the lines around the text, and the text: nothing before there are results."""
    runs = [json.loads(path.read_text()) for path in sorted(repository.glob(FILES))]
    return PAGE, MARKS, text_of(runs) if runs else ""


def text_of(runs: Sequence[Run]) -> str:
    first = runs[0]
    gpu = first["device"].split()[-1]
    early, late = (f"{begin:,} to {end:,}" for begin, end in first["windows"].values())
    files = " and ".join(f"[{run['arm']}](../benchmarks/h200/parts/long-run-{run['arm']}.json)" for run in runs)
    text = (
        f"`python -m benchmarks.long_run` trains SmolLM2-135M for {first['steps']:,} steps in one run on one {gpu}, "
        f"with vLLM in the trainer. The run evaluates every {first['evaluate_every']} steps, saves every "
        f"{first['save_every']}, writes its report and logs completions. The table has medians of steps {early} and of "
        f"steps {late}. Host memory is that of all processes of the run, without pages of files; a page that they "
        f"share counts once. The files have all readings: {files}."
    )
    paragraph = fill(text, 120, break_long_words=False, break_on_hyphens=False)
    return f"{paragraph}\n\n{_figures(runs)}\n{_files(runs)}"


def _figures(runs: Sequence[Run]) -> str:
    columns: dict[str, Callable[[str], str]] = {"": lambda name: name}
    for run in runs:
        columns |= _columns(run["arm"], run["figures"])
    return table(columns, [name for name, figure in FIGURES.items() if figure.limit is not None])


def _columns(arm: str, figures: dict[str, Any]) -> dict[str, Callable[[str], str]]:
    return {
        f"{arm}: early": lambda name: _value(figures[name], "early"),
        f"{arm}: last": lambda name: _value(figures[name], "late"),
        f"{arm}: growth": lambda name: _growth(figures[name]),
    }


def _value(figure: dict[str, Any], when: str) -> str:
    if figure[when] is None:
        return "-"
    return f"{figure[when]:.0f}" if figure["limit"] == 0 else f"{figure[when]:.3f} {figure['unit']}"


def _growth(figure: dict[str, Any]) -> str:
    if figure["drift"] is None:
        return "-"
    return f"{figure['drift']:+.0f}" if figure["limit"] == 0 else f"{100 * figure['drift']:+.2f} %"


def _files(runs: Sequence[Run]) -> str:
    columns: dict[str, Callable[[Run], str]] = {
        "": lambda run: str(run["arm"]),
        "the run": lambda run: f"{run['seconds'] / 60:.1f} minutes",
        "an evaluation": lambda run: _median(run["evaluations"]),
        "a save and a step": lambda run: _median(run["saves"]),
        "report.html": lambda run: f"{_mb(run['report'])}, written in {run['report']['seconds']:.1f} s",
        "logging.jsonl": lambda run: f"{_mb(run['log'])}, {run['log']['rows']:,} rows",
        "completions.jsonl": lambda run: f"{_mb(run['completions'])}, {run['completions']['rows']:,} rows",
    }
    return table(columns, runs)


def _median(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.1f} s" if seconds else "-"


def _mb(file: dict[str, Any]) -> str:
    return f"{file['bytes'] / 1e6:.1f} MB"
