"""docs/learning.md, from the JSON files of benchmarks/learn.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks.harness.markdown import table
from benchmarks.harness.other_pages import with_table
from benchmarks.harness.paths import REPOSITORY
from benchmarks.harness.results import ARMS, NAMES

from .bands import (
    FILES,
    TIMED_FILES,
    WINDOW,
    Point,
    Run,
    accuracies,
    by_arm,
    is_complete,
    is_trained,
    read_runs,
    rewards,
    seconds_per_step,
    steps_below,
)
from .curves import draw
from .prompts import HELD_OUT, QUESTION, SEARCH, SYSTEM, TASK
from .search import CHOICE, CHOSEN, GROUPS, LEARNING_RATES, SEED, STEPS, TIMED_STEPS
from .settings import TEMPLATE, Paths, Settings, command_of

PAGE, CHART, README = Path("docs/learning.md"), Path("docs/learning.svg"), Path("README.md")
IN_README = ("<!-- curves -->\n", "<!-- end of curves -->\n")
CAPTION = f"SmolLM2-135M-Instruct learns sums: [rewards and held-out accuracy of each trainer]({PAGE}).\n"
NOT_RUN = "not run yet"
SEEDS = (1, 2, 3)
INTRODUCTION = f"""\
# Learning curves

<!-- Written by `python -m benchmarks.learn report` from {FILES} and
     learning-time-*.json. A test compares it. -->

This page compares four trainers on one task, sums for SmolLM2-135M-Instruct: this package, ms-swift's own Megatron
trainer, TRL and verl. Model, prompts, rewards, batch and optimizer are the same; each trainer has seeds 1, 2 and 3.

To repeat it on all GPUs of a machine (6000: seconds in which a run must end to be started; another call continues):

```bash
swift-megatron-grpo get-model smollm2 smollm2
bash benchmarks/learn_chain.sh smollm2 work benchmarks/h200/parts 6000
python -m benchmarks.learn report
```
"""
METHOD = f"""\
## Task and accuracy

* Problems: sums and differences ({TASK}), as in
  "{QUESTION.format("15 - 43 + 7")}"
  No held-out problem is a training problem.
* Reward: 1 if the last number of the completion is the solution, and 0 otherwise.
* Prompts: every row has the system prompt "{SYSTEM}".
  The model's own template adds it where there is none, but ms-swift's template `{TEMPLATE}` does not. With it, both
  make the same tokens. TRL and verl use the model's own. `python -m benchmarks.learn data` checks every row.
* Accuracy: the share of {HELD_OUT} held-out problems that are solved greedily. One program measures the weights that
  each trainer saves, with vLLM in bf16. Tokenizer and template are those of the model before training.
* Seconds: the runs of the curves share GPUs, so each trainer is timed in other runs with equal settings. They have
  {TIMED_STEPS} steps, a GPU and all its cores. *A step* is their median without the first step, start and saving. The
  seconds of the curves are steps times that.
"""
CHOOSING = f"""\
## Learning rate and group size

They are chosen with this package alone, with seed {SEED} and {STEPS} steps, on other problems
({SEARCH}).
The rule was set before the search: the highest held-out accuracy on average over the weights that are saved while it
trains.
"""
DIFFERENCES = """\
## Remaining differences

* Precision: both Megatron trainers compute in bf16 with fp32 copies of the weights in the optimizer. TRL and verl keep
  fp32 weights and compute in bf16.
* Micro batches: this package packs by tokens, ms-swift trains at most 32 completions at a time, verl 64. TRL trains
  all at once where it is timed, and a quarter where runs share a GPU.
* verl 0.9.1 looks every 2 s whether a rollout is complete. Here it looks every 0.05 s.
* Attention: ms-swift needs flash-attn for `--attention_backend flash`, so it has `fused`, the kernel of cuDNN.
* Weight decay is 0, because trainers differ in the parameters that they exempt.
* Seeds: each trainer shuffles prompts in its own way. verl gets the seed for its data and for vLLM, and TRL does not
  pass it to vLLM.
* TRL's correction for the difference between vLLM and the trainer is off, because the other trainers have none by
  default.
* The authors of TRL and verl have not reviewed these settings.
"""


def write_page(repository: Path) -> None:
    for path, text in of_repository(repository).items():
        (repository / path).write_text(text)


def of_repository(repository: Path) -> dict[Path, str]:
    """Return the page, its chart and the README from the JSON files of a repository."""
    choices = [json.loads(file.read_text()) for file in repository.glob(f"benchmarks/*/parts/{CHOICE}")]
    if len(choices) > 1:
        raise ValueError(f"learn: the repository has {len(choices)} files {CHOICE}; keep one")
    timed = read_runs(repository, TIMED_FILES)
    written = files(read_runs(repository), timed, choices[0] if choices else None)
    image = f"[![Learning curves]({CHART})]({PAGE})\n\n{CAPTION}" if CHART in written else ""
    return written | {README: with_table((repository / README).read_text(), IN_README, image)}


def files(runs: Sequence[Run], timed: Sequence[Run], choice: dict[str, Any] | None) -> dict[Path, str]:
    """Return the page, and its chart if a trainer has trained, by their paths in the repository."""
    arms = by_arm(runs)
    trained = [run for of_arm in arms.values() for run in of_arm]
    settings = Settings(**trained[0]["settings"]) if trained else Settings()
    if choice and trained and any(choice[name] != getattr(settings, name) for name in CHOSEN):
        raise ValueError(f"learn: the runs do not have the {' and '.join(CHOSEN)} of {CHOICE}")
    seconds = {arm: seconds_per_step(timed, arm) for arm in ARMS}
    of_step = {arm: statistics.median(seconds[arm]) if seconds[arm] else None for arm in ARMS}
    of_reward, of_accuracy = (
        {arm: of(runs, of_step[arm]) for arm, runs in arms.items()} for of in (rewards, accuracies)
    )
    sections = [
        INTRODUCTION,
        *(["![Reward and held-out accuracy over steps and over seconds](learning.svg)\n"] if trained else []),
        f"## Results\n\n{_results(arms, seconds)}",
        *_not_run(arms, runs, timed),
        *([_rewards(of_reward)] if trained else []),
        *([_accuracies(of_accuracy)] if any(of_accuracy.values()) else []),
        METHOD,
        f"{CHOOSING}\n{_candidates(choice)}",
        DIFFERENCES,
        _commands(arms, settings),
    ]
    return {PAGE: "\n".join(sections)} | ({CHART: draw(of_reward, of_accuracy)} if trained else {})


def _results(arms: Mapping[str, list[Run]], seconds: Mapping[str, list[float]]) -> str:
    scored = {arm: [run for run in runs if is_complete(run)] for arm, runs in arms.items()}

    def mean(arms: Mapping[str, list[Run]], of: Callable[[Run], float], form: str) -> Callable[[str], str]:
        return lambda arm: format(statistics.fmean(map(of, arms[arm])), form) if arms[arm] else NOT_RUN

    columns: dict[str, Callable[[str], str]] = {
        "trainer": lambda arm: NAMES[arm],
        "seeds": lambda arm: ", ".join(str(run["seed"]) for run in arms[arm]) or NOT_RUN,
        "GPU": lambda arm: ", ".join(sorted({run["device"] for run in arms[arm]})) or NOT_RUN,
        f"reward, last {WINDOW} steps": mean(arms, lambda run: statistics.fmean(run["reward"][-WINDOW:]), ".3f"),
        "accuracy before": mean(scored, lambda run: run["held_out"][0]["accuracy"], ".1%"),
        "after": mean(scored, lambda run: run["held_out"][-1]["accuracy"], ".1%"),
        "s a step": lambda arm: _seconds(seconds[arm]),
    }
    return table(columns, ARMS)


def _seconds(values: Sequence[float]) -> str:
    if not values:
        return NOT_RUN
    return f"{statistics.median(values):.2f} ({', '.join(f'{value:.2f}' for value in values)})"


def _not_run(arms: Mapping[str, list[Run]], runs: Sequence[Run], timed: Sequence[Run]) -> list[str]:
    """Return a list of the missing and the incomplete runs."""
    seeds = {arm: [seed for seed in SEEDS if seed not in {run["seed"] for run in arms[arm]}] for arm in arms}
    lines = [f"* {NAMES[arm]}: {NOT_RUN} with seeds {', '.join(map(str, missing))}." for arm, missing in seeds.items()
             if missing]  # fmt: skip
    lines += [
        f"* {NAMES[run['arm']]}, seed {run['seed']}: its rental ended before its weights were scored; the accuracies "
        "are those of the other seeds."
        for run in runs
        if is_trained(run) and not is_complete(run)
    ]
    lines += [
        f"* {NAMES[run['arm']]}, seed {run['seed']}: ended after {len(run['reward'])} of {run['settings']['steps']} "
        f"steps (exit code {run['exit_code']}); not in the table."
        for run in runs
        if not is_trained(run)
    ]
    lines += [
        f"* {NAMES[run['arm']]}, timed with seed {run['seed']}: its limit ended it after {len(run['seconds'])} of "
        f"{run['settings']['steps']} steps."
        for run in timed
        if run["exit_code"] is None
    ]
    return ["\n".join([*lines, ""])] if lines else []


def _rewards(bands: Mapping[str, Sequence[Point]]) -> str:
    text = f"## Rewards\n\nMean over seeds, with the lowest and the highest seed in brackets.\n\n" \
           f"{_table(bands, 'steps', lambda point: f'{point.step - WINDOW + 1} to {point.step}', '.3f')}"  # fmt: skip
    if bands["ours"] and sum(map(bool, bands.values())) > 1:
        below = steps_below(bands)
        verdict = f"is below all other seeds in the windows that end with {', '.join(map(str, below))}" if below else \
            "is nowhere below all seeds of the other trainers"  # fmt: skip
        text += f"\nThe mean of this package {verdict}.\n"
    return text


def _accuracies(bands: Mapping[str, Sequence[Point]]) -> str:
    text = f"## Held-out accuracy\n\n{_table(bands, 'after step', lambda point: str(point.step), '.1%')}"
    ratios = {arm: points[-1].mean / points[0].mean for arm, points in bands.items() if points and points[0].mean}
    times = ", ".join(f"{ratio:.1f} ({NAMES[arm]})" for arm, ratio in ratios.items())
    return f"{text}\nAccuracy after training divided by that before: {times}.\n" if ratios else text


def _table(bands: Mapping[str, Sequence[Point]], first: str, name: Callable[[Point], str], form: str) -> str:
    """Return the points of all trainers that have any, one row for each step."""
    shown = [arm for arm in bands if bands[arm]]
    columns: dict[str, Callable[[int], str]] = {first: lambda place: name(bands[shown[0]][place])} | {
        NAMES[arm]: (lambda place, arm=arm: _range(bands[arm][place], form)) for arm in shown
    }
    return table(columns, range(len(bands[shown[0]])))


def _range(point: Point, form: str) -> str:
    return f"{point.mean:{form}} ({point.low:{form}} to {point.high:{form}})"


def _candidates(choice: dict[str, Any] | None) -> str:
    """Return the table of the candidates that were measured, the chosen one first in words."""
    if choice is None:
        rates, groups = (", ".join(f"{value:g}" for value in values) for values in (LEARNING_RATES, GROUPS))
        return f"The search, over the learning rates {rates} and groups of {groups}, was {NOT_RUN}.\n"
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "learning rate": lambda row: f"{row['learning_rate']:g}",
        "group": lambda row: str(row["generations"]),
    } | {
        f"after step {step}": lambda row, step=step: f"{row['accuracies'][step]:.1%}"
        for step in choice["candidates"][0]["accuracies"]
    }  # fmt: skip
    columns["mean in training"] = lambda row: f"{row['mean']:.1%}"
    missing = len(LEARNING_RATES) * len(GROUPS) - len(choice["candidates"])
    note = f" {missing} candidates did not end and are missing." if missing else ""
    by = f"by {choice['problems']} held-out problems, on {', '.join(choice['device'])}"
    return f"""\
Chosen: {choice["learning_rate"]:g} and groups of {choice["generations"]}, {by}.{note}

{table(columns, choice["candidates"])}"""


def _commands(arms: Mapping[str, list[Run]], settings: Settings) -> str:
    """Return every flag of every trainer, as seed 1 has them, and the versions that were installed."""
    text = "## Flags\n\nAll flags of seed 1; a trainer's other settings are its defaults.\n"
    paths = Paths(Path("MODEL"), Path("train.jsonl"), Path("OUTPUT"))
    for arm in ARMS:
        given = command_of(arm, settings, paths, 1)
        flags = " ".join(given).replace(f"{REPOSITORY}/", "")
        wrapped = fill(flags, 118, break_long_words=False, break_on_hyphens=False)
        versions = ", ".join(f"{name} {version}" for run in arms[arm][:1] for name, version in run["versions"].items())
        text += f"\n### {NAMES[arm]}\n\n```\n{wrapped}\n```\n\n```\n{fill(versions, 118) or NOT_RUN}\n```\n"
    return text
