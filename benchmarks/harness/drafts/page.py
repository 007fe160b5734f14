"""The tables of docs/speculation.md, from the JSON files of benchmarks/drafts.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.harness.markdown import lines_of, table
from benchmarks.harness.other_pages import with_table

from .runs import MODES, TASKS, Run, first_difference, name_of

FOLDER, PAGE = "benchmarks/h200/parts", Path("docs/speculation.md")
BY = "by benchmarks/drafts.py report"
TRAINED = (f"<!-- training with drafts, {BY} -->\n", "<!-- end of training with drafts -->\n")
FIRST = (f"<!-- vLLM's first model runner, {BY} -->\n", "<!-- end of vLLM's first model runner -->\n")
TIMED = (f"<!-- generation with drafts, {BY} -->\n", "<!-- end of generation with drafts -->\n")
NOT_RUN = "not run yet"
PAIRS = [*((task, "bfloat16") for task in TASKS), ("sums", "float32")]  # that the page compares
GENERATED = [("8b", 64), ("8b", 128)]
WINDOW = 25  # steps
Modes = dict[str, Run]


def write_page(repository: Path) -> None:
    file = repository / PAGE
    text = file.read_text()
    for marks, written in tables(repository):
        text = with_table(text, marks, written)
    file.write_text(text)


def tables(repository: Path) -> list[tuple[tuple[str, str], str]]:
    """Return the lines around each table, and the table."""
    folder = repository / FOLDER
    runs = {pair: modes_of(folder, *pair) for pair in PAIRS}
    curves = [curve(pair, modes) for pair, modes in runs.items() if {"off", "history"} <= modes.keys()]
    first = {(task, "bfloat16"): modes_of(folder / "first-runner", task, "bfloat16") for task in TASKS}
    timed = {pair: read(folder / f"drafts-{pair[0]}-{pair[1]}.json") for pair in GENERATED}
    return [(TRAINED, "\n".join([training(runs), *curves])), (FIRST, training(first)), (TIMED, generation(timed))]


def modes_of(folder: Path, task: str, dtype: str) -> Modes:
    """Return the runs that have ended, or were ended at their limit."""
    found = {mode: read(folder / f"drafts-{name_of(task, dtype, mode)}.json") for mode in MODES}
    return {mode: run for mode, run in found.items() if run and run["exit_code"] in (0, None) and run["reward"]}


def read(file: Path) -> Run:
    return json.loads(file.read_text()) if file.is_file() else {}


def training(runs: dict[tuple[str, str], Modes]) -> str:
    def both(of: Callable[[Modes], str]) -> Callable[[tuple[str, str]], str]:
        return lambda pair: of(runs[pair]) if {"off", "history"} <= runs[pair].keys() else NOT_RUN

    columns: dict[str, Callable[[tuple[str, str]], str]] = {
        "task": lambda pair: TASKS[pair[0]].says,
        "precision": lambda pair: {"bfloat16": "bf16", "float32": "fp32"}[pair[1]],
        "tokens differ first": both(lambda modes: differs(modes, "history")),
        "gradient norms": both(lambda modes: differs(modes, "history", "grad_norm")),
        "tokens, repeated without drafts": lambda pair: differs(runs[pair], "again"),
        f"rewards of {WINDOW} steps, furthest apart": both(lambda modes: apart(modes, "history")),
        "the same, repeated": lambda pair: apart(runs[pair], "again"),
        "accepted a step, first and last rollouts": both(lambda modes: accepted(modes["history"])),
        "steps saved": both(lambda modes: f"{fmean(modes['history']['steps_saved']):.0%}"),
        "generation without, with": both(lambda modes: seconds(modes, lambda run: run["generation"])),
        "step without, with": both(lambda modes: seconds(modes, seconds_of_steps)),
    }
    return table(columns, list(runs))


def differs(modes: Modes, mode: str, series: str = "digests") -> str:
    if not {"off", mode} <= modes.keys():
        return NOT_RUN
    steps = min(len(modes[name][series]) for name in ("off", mode))
    step = first_difference(modes["off"], modes[mode], series)
    return f"in none of {steps} steps" if step is None else f"in step {step} of {steps}"


def windows(values: Sequence[float]) -> list[float]:
    return [fmean(values[begin : begin + WINDOW]) for begin in range(0, len(values), WINDOW)]


def apart(modes: Modes, mode: str) -> str:
    """Return how far the mean rewards of equal windows are apart at most."""
    if not {"off", mode} <= modes.keys():
        return NOT_RUN
    rewards = [modes[name]["reward"] for name in ("off", mode)]
    steps = min(map(len, rewards))
    pairs = zip(*(windows(values[:steps]) for values in rewards), strict=True)
    return f"{max(abs(one - two) for one, two in pairs):.3f}"


def accepted(run: Run) -> str:
    return f"{run['replayed']['first']:.2f}, {run['replayed']['last']:.2f}"


def seconds(modes: Modes, of: Callable[[Run], Sequence[float]]) -> str:
    series = [of(modes[mode]) for mode in ("off", "history")]
    without, drafted = (median(values[: min(map(len, series))]) for values in series)  # of steps that both have
    return f"{without:.3f} s, {drafted:.3f} s (**{without / drafted:.2f}**)"


def seconds_of_steps(run: Run) -> list[float]:
    """Return the seconds of each step but the first, which starts everything."""
    ends = run["seconds"]
    return [end - begin for begin, end in pairwise(ends)]


def curve(pair: tuple[str, str], modes: Modes) -> str:
    """Return what a pair of runs did, by windows of steps."""
    off, drafted = modes["off"], modes["history"]
    precision = {"bfloat16": "bf16", "float32": "fp32"}[pair[1]]
    steps = min(len(run["reward"]) for run in (off, drafted))
    columns = {
        "to step": [str(min(end, steps)) for end in range(WINDOW, steps + WINDOW, WINDOW)],
        "reward without": [f"{value:.3f}" for value in windows(off["reward"])],
        "with drafts": [f"{value:.3f}" for value in windows(drafted["reward"])],
        "tokens": [f"{value:.0f}" for value in windows(off["length"])],
        "log-prob": [f"{value:.2f}" for value in windows(off["mean_logprob"])],
        "steps saved": [f"{value:.0%}" for value in windows(drafted["steps_saved"])],
        "generation without": [f"{value:.3f} s" for value in windows(off["generation"])],
        "generation with": [f"{value:.3f} s" for value in windows(drafted["generation"])],
    }
    rows = zip(*columns.values(), strict=False)  # a run that was ended has fewer
    return f"{TASKS[pair[0]].says.capitalize()}, {precision}, means of {WINDOW} steps:\n\n" \
           f"{lines_of([list(columns), *rows])}\n"  # fmt: skip


def generation(timed: dict[tuple[str, int], dict[str, Any]]) -> str:
    def of(value: Callable[[dict[str, Any]], str]) -> Callable[[tuple[str, int]], str]:
        return lambda pair: value(timed[pair]) if timed[pair] and timed[pair]["rounds"]["history"] else NOT_RUN

    bands = sorted({int(band) for part in timed.values() for band in bands_of(part)}, reverse=True)
    columns: dict[str, Callable[[tuple[str, int]], str]] = {
        "model": lambda pair: pair[0].upper(),
        "requests": lambda pair: str(pair[1]),
        "accepted a step": of(lambda part: f"{accepted_of_rounds(part):.2f}"),
        "without drafts": of(lambda part: f"{seconds_of_rounds(part, 'off'):.2f} s"),
        "with": of(lambda part: f"{seconds_of_rounds(part, 'history'):.2f} s"),
        "times as fast": of(
            lambda part: f"**{seconds_of_rounds(part, 'off') / seconds_of_rounds(part, 'history'):.2f}**"
        ),
    }
    columns |= {f"while up to {band} run": of(partial(speedup, str(band))) for band in bands}
    return table(columns, GENERATED)


def bands_of(part: dict[str, Any]) -> set[str]:
    return {band for rounds in part.get("rounds", {}).values() for one in rounds for band in one["bands"]}


def seconds_of_rounds(part: dict[str, Any], arm: str) -> float:
    return median(float(one["seconds"]) for one in part["rounds"][arm])


def accepted_of_rounds(part: dict[str, Any]) -> float:
    rounds = part["rounds"]["history"]
    return float(sum(one["accepted"] for one in rounds) / sum(one["steps_of_requests"] for one in rounds))


def speedup(band: str, part: dict[str, Any]) -> str:
    """Return how much faster tokens came while so many requests ran."""
    off, drafted = (speed([one["bands"][band] for one in part["rounds"][arm] if band in one["bands"]])
                    for arm in ("off", "history"))  # fmt: skip
    return f"{drafted / off:.2f}" if off and drafted else "-"


def speed(bands: Sequence[dict[str, float]]) -> float:
    """Return tokens a second."""
    spent = sum(band["seconds"] for band in bands)
    return sum(band["tokens"] for band in bands) / spent if spent else 0.0
