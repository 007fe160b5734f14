"""docs/learning.md, from the JSON files of benchmarks/learn.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill

from benchmarks.harness.markdown import table
from benchmarks.harness.paths import REPOSITORY
from benchmarks.harness.results import ARMS, NAMES

from .bands import FILES, WINDOW, Point, Run, band, by_arm, is_complete, read_runs, seconds_per_step, steps_below
from .curves import draw
from .prompts import INSTRUCTION, SYSTEM, TASK, TASK_SETTINGS
from .settings import TEMPLATE, Paths, Settings, command_of

PAGE, CHART = Path("docs/learning.md"), Path("docs/learning.svg")
NOT_RUN = "not run yet"
SEEDS = (1, 2, 3)
INTRODUCTION = f"""\
# Learning curves

<!-- Written by `python -m benchmarks.learn report` from {FILES}. A test compares it. -->

This page compares four trainers on one task, sums for SmolLM2-135M-Instruct: this package, ms-swift's own Megatron
trainer, TRL and verl. Model, prompts, rewards, batch and optimizer are the same; each trainer has seeds 1, 2 and 3.
"""
METHOD = f"""\
## Task and accuracy

* Problems: `{TASK}` of reasoning_gym with `{TASK_SETTINGS}`, followed by
  "{INSTRUCTION}" No held-out problem is a training problem.
* Reward: reasoning_gym's score. It is 1 for the solution alone, and less for a completion that contains it.
* Prompts: every row has the system prompt "{SYSTEM}".
  The model's own template adds it where there is none, but ms-swift's template `{TEMPLATE}` does not. With it, both
  make the same tokens. TRL and verl use the model's own. `python -m benchmarks.learn data` checks every row.
* Accuracy: one program measures the checkpoints of all trainers, with vLLM, greedily, on the 256 held-out problems. It
  counts completions with the full score. Tokenizer and template are those of the model before training.
* Learning rate and group size were set before any run of this page, and not searched: they are those of an earlier run
  on other sums.
* Seconds: from the beginning of the first step, without start and saving. *A step* is the median without the first.
"""
DIFFERENCES = """\
## Remaining differences

* Precision: both Megatron trainers compute in bf16 with fp32 copies of the weights in the optimizer. TRL and verl keep
  fp32 weights and compute in bf16.
* Micro batches: this package packs by tokens, ms-swift trains 32 completions at a time, TRL all of them, verl packs.
* Weight decay is 0, because trainers differ in the parameters that they exempt.
* Seeds: each trainer shuffles prompts in its own way. verl gets the seed for its data alone, and TRL does not pass it
  to vLLM.
* TRL's correction for the difference between vLLM and the trainer is off, because the other trainers have none by
  default.
* The authors of TRL and verl have not reviewed these settings.
"""


def write_page(repository: Path) -> None:
    for path, text in files(read_runs(repository)).items():
        (repository / path).write_text(text)


def files(runs: Sequence[Run]) -> dict[Path, str]:
    """Return the page, and its chart if a trainer has a complete run, by their paths in the repository."""
    arms = by_arm(runs)
    bands = {arm: band(runs_of_arm) for arm, runs_of_arm in arms.items()}
    drawn = any(bands.values())
    sections = [
        INTRODUCTION,
        *(["![Reward over steps and over seconds](learning.svg)\n"] if drawn else []),
        f"## Results\n\n{_results(arms)}",
        *_not_run(arms, runs),
        *([_rewards(bands)] if drawn else []),
        METHOD,
        DIFFERENCES,
        _commands(arms),
    ]
    return {PAGE: "\n".join(sections)} | ({CHART: draw(bands)} if drawn else {})


def _results(arms: Mapping[str, list[Run]]) -> str:
    def mean(of: Callable[[Run], float], form: str) -> Callable[[str], str]:
        return lambda arm: format(statistics.fmean(map(of, arms[arm])), form) if arms[arm] else NOT_RUN

    columns: dict[str, Callable[[str], str]] = {
        "trainer": lambda arm: NAMES[arm],
        "seeds": lambda arm: ", ".join(str(run["seed"]) for run in arms[arm]) or NOT_RUN,
        "GPU": lambda arm: ", ".join(sorted({run["device"] for run in arms[arm]})) or NOT_RUN,
        f"reward, last {WINDOW} steps": mean(lambda run: statistics.fmean(run["reward"][-WINDOW:]), ".3f"),
        "accuracy before": mean(lambda run: run["before"]["accuracy"], ".1%"),
        "after": mean(lambda run: run["after"]["accuracy"], ".1%"),
        "s a step": mean(seconds_per_step, ".2f"),
        "s of all steps": mean(lambda run: run["seconds"][-1], ".0f"),
    }
    return table(columns, ARMS)


def _not_run(arms: Mapping[str, list[Run]], runs: Sequence[Run]) -> list[str]:
    """Return a list of the missing and the incomplete runs."""
    seeds = {arm: [seed for seed in SEEDS if seed not in {run["seed"] for run in arms[arm]}] for arm in arms}
    lines = [f"* {NAMES[arm]}: {NOT_RUN} with seeds {', '.join(map(str, missing))}." for arm, missing in seeds.items()
             if missing]  # fmt: skip
    lines += [
        f"* {NAMES[run['arm']]}, seed {run['seed']}: ended after {len(run['reward'])} of {run['settings']['steps']} "
        f"steps (exit code {run['exit_code']}); not in the table."
        for run in runs
        if not is_complete(run)
    ]
    return ["\n".join([*lines, ""])] if lines else []


def _rewards(bands: Mapping[str, Sequence[Point]]) -> str:
    shown = [arm for arm in bands if bands[arm]]
    columns: dict[str, Callable[[int], str]] = {
        "steps": lambda place: f"{bands[shown[0]][place].step - WINDOW + 1} to {bands[shown[0]][place].step}"
    } | {NAMES[arm]: (lambda place, arm=arm: _range(bands[arm][place])) for arm in shown}
    text = f"## Rewards\n\nMean over seeds, with the lowest and the highest seed in brackets.\n\n" \
           f"{table(columns, range(len(bands[shown[0]])))}"  # fmt: skip
    if shown[0] == "ours" and len(shown) > 1:
        below = steps_below(bands)
        verdict = f"is below all other seeds in the windows that end with {', '.join(map(str, below))}" if below else \
            "is nowhere below all seeds of the other trainers"  # fmt: skip
        text += f"\nThe mean of this package {verdict}.\n"
    return text


def _range(point: Point) -> str:
    return f"{point.mean:.3f} ({point.low:.3f} to {point.high:.3f})"


def _commands(arms: Mapping[str, list[Run]]) -> str:
    """Return every flag of every trainer, as seed 1 has them, and the versions that were installed."""
    text = "## Flags\n\nAll flags of seed 1; a trainer's other settings are its defaults.\n"
    paths = Paths(Path("MODEL"), Path("train.jsonl"), Path("OUTPUT"))
    for arm in ARMS:
        given = command_of(arm, Settings(), paths, 1)
        flags = " ".join(given).replace(f"{REPOSITORY}/", "")
        wrapped = fill(flags, 118, break_long_words=False, break_on_hyphens=False)
        versions = ", ".join(f"{name} {version}" for run in arms[arm][:1] for name, version in run["versions"].items())
        text += f"\n### {NAMES[arm]}\n\n```\n{wrapped}\n```\n\nVersions: {versions or NOT_RUN}.\n"
    return text
