"""docs/performance.md, and the table in README.md: everything they say is read from the files in benchmarks/."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from .picture import NAMES, draw
from .results import ARMS, PHASES, Comparison, Measured, Run

Row = TypeVar("Row")
PAGE, PICTURE, RESULTS = Path("docs/performance.md"), Path("docs/performance.svg"), "benchmarks/*/*.json"
README, IN_README = Path("README.md"), ("<!-- speed, by benchmarks/bench.py report -->\n", "<!-- end of speed -->\n")
HEADLINES = ("step-best-1.7b", "fixed-1.7b", "long-0.6b", "long-1.7b", "long-4b", "dp4-1.7b", "pp2-1.7b", "tp2-1.7b")
WHATS = {
    "equal flags": "Equal flags",
    "each at its best": "Each at its best setting, of those tried under the same memory cap",
    "chosen pair": "Chosen pairs of settings",
}
INTRODUCTION = """\
# Performance

<!-- Written by `python -m benchmarks.bench report` from benchmarks/*/*.json. Do not edit: a test compares them. -->

This package against ms-swift's own Megatron GRPO trainer: the same command line, machine, model with random weights,
prompts and lengths of completions, one process after the other in turns. Each number is the median of the measured
steps, with the least and the most in brackets; the first steps of each process are warm-up and are left out.
`python -m benchmarks.bench train --help` measures again, `benchmarks/bench_h200.sh` everything on H200.

* *Train phase*: all log-prob passes, forward and backward, exchange of gradients, optimizer. In its runs completions
  are made up from a seed, the same tokens for both, and vLLM does not start. *Step*: everything, with vLLM in the
  training processes; each completion is stopped at the length that the seed says.
* *mbs4* is `--micro_batch_size 4`, *tokens16384* `--max_tokens_per_micro_batch 16384`; the other parts of a setting are
  its layout, as in `python -m swift_megatron_grpo.tools.check_layouts`.
* *MFU*: the FLOPs that forward and backward of these tokens need (`training_flops` in `benchmarks/harness/workload.py`:
  half of the attention scores, the output layer on completion tokens only, nothing computed twice), by the time of
  forward and backward and what the chips can do in bf16. One formula for both.
* *Peak*: the most that PyTorch had allocated in the train phase, on the fullest GPU.
* *Loss* and *gradient norm* are those of the first measured step. On policy the ratio is 1 and the advantages of a
  group sum to 0, so where its completions weigh the same the loss is 0 but for rounding; the gradient norm shows that
  both did the same. At more than one tensor-parallel rank ms-swift's leaves out shards (docs/architecture.md). Where
  vLLM runs, each arm samples completions of its own.
"""


def write_page(repository: Path) -> None:
    runs = read_runs(repository)
    (repository / PAGE).write_text(page(runs))
    (repository / PICTURE).write_text(draw(runs))
    readme = repository / README
    readme.write_text(with_headlines(readme.read_text(), runs))


def read_runs(repository: Path) -> list[Run]:
    return [Run.read(path) for path in sorted(repository.glob(RESULTS))]


def page(runs: Sequence[Run]) -> str:
    parts = [INTRODUCTION, f"![Seconds of a step by phase]({PICTURE.name})\n"]
    for kind, title in (("train", "Train phase"), ("step", "Step")):
        compared = [each for run in runs if run.kind == kind for each in run.comparisons()]
        for what, heading in WHATS.items():
            rows = [each for each in compared if each.what == what]
            if rows:
                parts += [f"## {title}. {heading}\n", _ratios(rows), _costs(rows)]
    parts += ["## Phases\n\nMedian seconds.\n", _phases(runs), "## Every setting that was tried\n", _tried(runs)]
    parts += ["## Runs\n", *map(_describe, runs)]
    return "\n".join(parts)


def with_headlines(readme: str, runs: Sequence[Run]) -> str:
    begin, end = IN_README
    before, rest = readme.split(begin)
    return before + begin + headlines(runs) + end + rest.split(end)[1]


def headlines(runs: Sequence[Run]) -> str:
    by_name = {run.name: run for run in runs}
    rows = [each for name in HEADLINES for each in by_name[name].comparisons() if each.what == "each at its best"]
    return _table(
        {
            "": lambda row: {"train": "train phase", "step": "whole step"}[row.ours.run.kind],
            "Qwen3": lambda row: row.ours.run.workload["shape"].upper(),
            "tokens of a completion": lambda row: _in_words(row.ours.run.workload["lengths"]),
            "GPUs": lambda row: _gpus(row.ours),
            "ms-swift": lambda row: f"{row.stock.median:.2f} s",
            "here": lambda row: f"{row.ours.median:.2f} s",
            "times as fast": lambda row: f"**{row.ratio:.2f}**",
        },
        rows,
    )


def _in_words(lengths: str) -> str:
    kind, *numbers = lengths.split(":")
    return numbers[0] if kind == "constant" else f"long-tailed, median {numbers[0]}, at most {int(numbers[2]):,}"


def _gpus(each: Measured) -> str:
    """The setting's layout, without its micro batches."""
    layout = [part.upper() for part in each.setting.split("+") if not part.startswith(("mbs", "tokens"))]
    return " ".join([str(each.run.ranks), *(["as", "+".join(layout)] if layout else [])])


def _ratios(rows: Sequence[Comparison]) -> str:
    return _table(
        {
            "run": lambda row: row.ours.run.name,
            "this package": lambda row: row.ours.setting,
            "s": lambda row: _seconds(row.ours),
            "ms-swift": lambda row: row.stock.setting,
            "s ": lambda row: _seconds(row.stock),
            "ratio": lambda row: f"**{row.ratio:.2f}**",
            "goal": lambda row: row.ours.run.goal,
            "losses": lambda row: _both(row, lambda each: f"{each.steps[0].loss:.2e}"),
            "gradient norms": lambda row: _both(row, lambda each: f"{each.steps[0].grad_norm:.4g}"),
        },
        rows,
    )


def _costs(rows: Sequence[Comparison]) -> str:
    """Ours / ms-swift's."""
    columns: dict[str, Callable[[Comparison], str]] = {
        "run": lambda row: row.ours.run.name,
        "settings": lambda row: f"{row.ours.setting} / {row.stock.setting}",
        "tokens/s/device": lambda row: _both(row, lambda each: f"{each.tokens_per_second_per_device:,.0f}"),
        "MFU": lambda row: _both(row, lambda each: "-" if each.mfu is None else f"{each.mfu:.1%}"),
        "peak GB": lambda row: _both(row, lambda each: f"{each.peak_gb:.1f}" if each.peak_gb else "-"),
        "peak, ratio": lambda row: f"{row.ours.peak_gb / row.stock.peak_gb:.2f}" if row.stock.peak_gb else "-",
        "ranks, max/mean": lambda row: _both(row, lambda each: f"{each.imbalance:.3f}"),
    }
    return _table(columns, rows)


def _phases(runs: Sequence[Run]) -> str:
    rows = [side for run in runs for side in compared_sides(run)]
    used = [phase for phase in PHASES if any(each.phase(phase) for each in rows)]
    columns: dict[str, Callable[[Measured], str]] = {
        "run": lambda each: each.run.name,
        "": lambda each: NAMES[each.arm],
        "setting": lambda each: each.setting,
    }
    for phase in used:
        columns[phase.replace("_", " ")] = lambda each, phase=phase: f"{each.phase(phase):.3f}"  # type: ignore[misc]
    return _table(columns, rows)


def compared_sides(run: Run) -> list[Measured]:
    """Every measured setting that a ratio of this run is about, once, ours first."""
    sides = [(each.arm, each.setting) for pair in run.comparisons() for each in (pair.ours, pair.stock)]
    return [run.measured(*side) for arm in ARMS for side in dict.fromkeys(sides) if side[0] == arm]


def _tried(runs: Sequence[Run]) -> str:
    rows = [run.measured(arm, setting) for run in runs for arm in ARMS for setting in run.settings(arm)]
    return _table(
        {
            "run": lambda each: each.run.name,
            "": lambda each: NAMES[each.arm],
            "setting": lambda each: each.setting,
            "s": lambda each: _seconds(each) if each.steps else each.run.status(each.arm, each.setting),
            "steps": lambda each: str(len(each.steps)),
            "peak GB": lambda each: f"{each.peak_gb:.1f}" if each.steps and each.peak_gb else "-",
        },
        rows,
    )


def _describe(run: Run) -> str:
    work = run.workload
    tokens = f"{run.prompt_tokens:,} tokens of prompts and {run.completion_tokens:,} of completions"
    cap = "no memory cap" if run.memory_cap_gb is None else f"at most {run.memory_cap_gb:g} GB of each GPU"
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    return f"""\
**{run.name}**: {run.ranks} x {run.device}; Qwen3 {work["shape"]}; {work["completions"]} completions in groups of
{work["generations"]}, lengths {work["lengths"]}, prompts {work["prompt_lengths"]}, seed {work["seed"]}:
{tokens} a step, {run.flops:.3g} FLOPs; {cap}; `{" ".join(run.flags)}`.
{versions}.
"""


def _seconds(each: Measured) -> str:
    return f"{each.median:.3f} ({min(each.seconds):.3f}-{max(each.seconds):.3f})"


def _both(row: Comparison, cell: Callable[[Measured], str]) -> str:
    return f"{cell(row.ours)} / {cell(row.stock)}"


def _table(columns: dict[str, Callable[[Row], str]], rows: Iterable[Row]) -> str:
    lines = [list(columns), ["---"] * len(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
