"""The tables of docs/async.md and docs/choosing_settings.md, from the JSON files of benchmarks/bench_waits.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.harness.learning.bands import (
    Point,
    accuracies,
    by_arm,
    is_complete,
    read_runs,
    rewards,
)
from benchmarks.harness.markdown import table
from benchmarks.harness.other_pages import with_table
from benchmarks.harness.results import Run
from benchmarks.simulate_tail import table as simulated_table

from .cases import CASES, CURVES, MODELS, REMEDIES, Variant

FILES = "benchmarks/h200/parts/waits-*.json"
OF_PEERS = "benchmarks/h200/step-lora-8b-tails.json"  # of benchmarks/bench.py: one step on each rollout of 8B
SERVERS_PAGE, SETTINGS_PAGE = Path("docs/async.md"), Path("docs/choosing_settings.md")
BY = "by benchmarks/bench_waits.py report"
MEASURED = (f"<!-- waits, {BY} -->\n", "<!-- end of waits -->\n")
LEARNED = (f"<!-- learning, {BY} -->\n", "<!-- end of learning -->\n")
SIMULATED = (f"<!-- simulated, {BY} -->\n", "<!-- end of simulated -->\n")
STEPS = (f"<!-- steps on a rollout, {BY} -->\n", "<!-- end of steps on a rollout -->\n")
MISSING, NOTHING = "not measured yet", "-"
# Rows of benchmarks/simulate_tail.py, and the case that measures them.
REPLACED = {
    **{f"0, `--steps_per_generation {steps}`": "steps-8b" for steps in (1, 2, 4)},
    **dict.fromkeys(("`--max_staleness 1`", "`--max_staleness 2`", "2, in flight"), "flight-8b"),
    "1, `--dynamic_sample`: a quarter of the groups is replaced": "spare-8b",
    "the same, with `--spare_groups auto`": "spare-8b",
}
Cases = Mapping[str, Mapping[str, "Row"]]  # by case and variant
Curve = dict[str, Any]


class Row:
    """All runs of a variant of a case."""

    def __init__(self, variant: Variant, runs: Sequence[dict[str, Any]]) -> None:
        self._variant, self._runs = variant, runs

    @property
    def step(self) -> float:
        return fmean(run["step"] for run in self._runs)

    @property
    def staleness(self) -> str:
        """Return mean and maximum in optimizer steps: of the rollout, and of the steps before on the same rollout."""
        steps = self._variant.rollout
        mean = fmean(run["metrics"].get("rollout/staleness", 0.0) for run in self._runs) * steps + (steps - 1) / 2
        most = max(run["metrics"].get("rollout/staleness_max", 0.0) for run in self._runs) * steps + steps - 1
        return f"{mean:.2f}, {most:.0f}"

    @property
    def generation(self) -> str:
        values = [run["metrics"]["time/generation"] for run in self._runs if "time/generation" in run["metrics"]]
        return f"{fmean(values):.2f} s" if values else NOTHING


def write_pages(repository: Path) -> None:
    for path, marks, text in tables(repository):
        file = repository / path
        file.write_text(with_table(file.read_text(), marks, text))


def tables(repository: Path) -> list[tuple[Path, tuple[str, str], str]]:
    """Return the path, the lines around the table, and the table."""
    cases = read_cases(repository)
    peers = read_peers(repository / OF_PEERS)
    learned = {remedy: read_runs(repository, FILES.replace("*", f"learn-{remedy}-*")) for remedy in CURVES}
    return [
        (SERVERS_PAGE, MEASURED, measured(cases, peers)),
        (SERVERS_PAGE, LEARNED, curves(by_arm(read_runs(repository))["ours"], learned)),
        (SERVERS_PAGE, SIMULATED, simulated(cases)),
        (SETTINGS_PAGE, STEPS, steps_on_a_rollout(cases)),
    ]


def read_cases(repository: Path) -> Cases:
    """Return what was measured; runs that did not end are left out."""
    cases: dict[str, dict[str, Row]] = {}
    for name, case in CASES.items():
        file = repository / FILES.replace("*", name)
        runs = json.loads(file.read_text())["runs"] if file.is_file() else []
        whole = {
            variant: [run for run in runs if run["variant"] == variant.name and run["step"]]
            for variant in REMEDIES[case.remedy].variants
        }
        cases[name] = {variant.name: Row(variant, runs) for variant, runs in whole.items() if runs}
    return cases


def read_peers(file: Path) -> dict[str, float]:
    """Return the seconds of a step of 8B by the other trainers' variants of `steps`."""
    if not file.is_file():
        return {}
    run = Run.read(file)
    found = {name: run.best(arm) for name, arm in (("ms-swift", "stock"), ("trl", "trl"))}
    return {name: best.median for name, best in found.items() if best is not None}


def measured(cases: Cases, peers: Mapping[str, float]) -> str:
    rows = [(remedy, variant) for remedy, each in REMEDIES.items() for variant in each.variants]
    columns: dict[str, Callable[[tuple[str, Variant]], str]] = {"settings": lambda row: row[1].says}
    for model in MODELS:
        columns |= _columns(cases, peers, model)
    columns["staleness: mean, maximum"] = lambda row: _staleness(cases, *row)
    columns["goal"] = lambda row: _goal(REMEDIES[row[0]].goal, row[1])
    return table(columns, rows)


def _columns(cases: Cases, peers: Mapping[str, float], model: str) -> dict[str, Callable[[tuple[str, Variant]], str]]:
    says = MODELS[model].says

    def found(row: tuple[str, Variant]) -> Row | None:
        return cases[f"{row[0]}-{model}"].get(row[1].name)

    def step(row: tuple[str, Variant]) -> str:
        remedy, variant = row
        if MODELS[model].shape and variant.arm != "ours":  # bench.py measures them, with one step on each rollout
            if remedy != "steps":
                return NOTHING
            return f"{peers[variant.name]:.2f} s" if variant.name in peers else MISSING
        each = found(row)
        return f"{each.step:.2f} s" if each else MISSING

    def generation(row: tuple[str, Variant]) -> str:
        each = found(row)
        return each.generation if each else NOTHING

    return {
        f"{says}: step": step,
        f"{says}: generation": generation,
        f"{says}: speedup": lambda row: speedup(cases[f"{row[0]}-{model}"], row[1]),
    }


def _staleness(cases: Cases, remedy: str, variant: Variant) -> str:
    """Return that of the larger model where it was measured."""
    found = [cases[f"{remedy}-{model}"].get(variant.name) for model in reversed(MODELS)]
    row = next(filter(None, found), None)
    return row.staleness if row and variant.arm == "ours" else NOTHING


def _goal(goal: float | None, variant: Variant) -> str:
    return f"{goal:g}" if goal and variant.over else NOTHING


def speedup(case: Mapping[str, Row], variant: Variant) -> str:
    if variant.over in case and variant.name in case:
        return f"**{case[variant.over].step / case[variant.name].step:.2f}**"
    return NOTHING


def steps_on_a_rollout(cases: Cases) -> str:
    """Return speed and staleness of each number of steps, without other trainers."""
    variants = [variant for variant in REMEDIES["steps"].variants if variant.arm == "ours"]
    columns: dict[str, Callable[[Variant], str]] = {
        "`--steps_per_generation`": lambda variant: str(variant.rollout),
        "staleness in steps: mean, maximum": lambda variant: f"{(variant.rollout - 1) / 2:g}, {variant.rollout - 1}",
    }
    for model, each in MODELS.items():
        columns |= _steps_of_model(cases[f"steps-{model}"], each.says)
    return table(columns, variants)


def _steps_of_model(case: Mapping[str, Row], says: str) -> dict[str, Callable[[Variant], str]]:
    return {
        f"{says}: step": lambda variant: f"{case[variant.name].step:.2f} s" if variant.name in case else MISSING,
        f"{says}: speedup": lambda variant: speedup(case, variant),
    }


def simulated(cases: Cases) -> str:
    """Return the simulated rows that nothing has measured."""
    return simulated_table(without=[row for row, case in REPLACED.items() if _is_whole(cases, case)]) + "\n"


def _is_whole(cases: Cases, name: str) -> bool:
    variants = REMEDIES[CASES[name].remedy].variants
    return all(variant.name in cases[name] for variant in variants if variant.arm == "ours")


def curves(synchronous: Sequence[Curve], learned: Mapping[str, Sequence[Curve]]) -> str:
    """Return how often the runs of a remedy are below, within and above the band of the synchronous runs."""
    rows = {remedy: [run for run in runs if is_complete(run)] for remedy, runs in learned.items()}

    def compare(of: Callable[[Sequence[Curve], float | None], list[Point]], runs: Sequence[Curve]) -> str:
        return places(of(synchronous, None), of(runs, None)) if runs else MISSING

    def last(runs: Sequence[Curve]) -> str:
        if not runs:
            return NOTHING
        own, band = accuracies(runs, None)[-1], accuracies(synchronous, None)[-1]
        return f"{own.mean:.1%} ({band.low:.1%} to {band.high:.1%})"

    return table(
        {
            "run": lambda remedy: _flags_of_curve(remedy),
            "seeds": lambda remedy: str(len(rows[remedy])),
            "reward: windows below, within, above": lambda remedy: compare(rewards, rows[remedy]),
            "held-out accuracy: below, within, above": lambda remedy: compare(accuracies, rows[remedy]),
            "at the end (band)": lambda remedy: last(rows[remedy]),
        },
        CURVES,
    )


def _flags_of_curve(remedy: str) -> str:
    variant = next(each for each in REMEDIES[remedy].variants if each.name == remedy)
    return f"`{REMEDIES[remedy].common} {variant.flags}`"


def places(band: Sequence[Point], points: Sequence[Point]) -> str:
    """Return how many means are below, within and above the range of the band's seeds, and the largest lack."""
    pairs = list(zip(band, points, strict=True))
    below = [each.low - point.mean for each, point in pairs if point.mean < each.low]
    above = sum(point.mean > each.high for each, point in pairs)
    lack = f" (by at most {max(below):.3f})" if below else ""
    return f"{len(below)}{lack}, {len(pairs) - len(below) - above}, {above}"
