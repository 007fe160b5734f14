"""Write docs/performance.md and the tables of README.md and docs/shared_prompts.md from benchmarks/*/*.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from .gpus import sections_of_gpus
from .markdown import table
from .picture import draw
from .results import ARMS, NAMES, PEERS, PHASES, Comparison, Measured, Run
from .workload import SHAPES

PAGE, PICTURE, RESULTS = Path("docs/performance.md"), Path("docs/performance.svg"), "benchmarks/*/*.json"
README, IN_README = Path("README.md"), ("<!-- speed, by benchmarks/bench.py report -->\n", "<!-- end of speed -->\n")
SHARED_PAGE, IN_SHARED_PAGE = (
    Path("docs/shared_prompts.md"),
    ("<!-- measured, by benchmarks/bench.py report -->\n", "<!-- end of measured -->\n"),
)
HEADLINES = ("step-best-1.7b", "fixed-1.7b", "long-0.6b", "long-1.7b", "long-4b", "dp4-1.7b", "pp2-1.7b", "tp2-1.7b")
TITLES = {
    "equal flags": "equal flags",
    "each at its best": "each at its best setting, of those tried under the same memory cap",
    "chosen pair": "chosen pairs of settings",
}
INTRODUCTION = """\
# Performance

<!-- Written by `python -m benchmarks.bench report` from benchmarks/*/*.json. Do not edit: a test compares them. -->

This page compares this package with ms-swift's own Megatron GRPO trainer. Both run the same command line on the same
machine, with the same random weights, prompts and completion lengths. Their processes run one at a time, in
alternation. Each number is the median over the measured steps, with the minimum and maximum in brackets. The first
steps of each process are warm-up and are not counted. `python -m benchmarks.bench train --help` describes how to
measure, and `benchmarks/bench_h200.sh` repeats all measurements on H200.

* *Train phase*: all log-prob passes, forward and backward, gradient reduction and the optimizer. In these runs the
  completions are generated from a seed, with the same tokens for both trainers, and vLLM does not start.
* *Step*: everything, with vLLM in the training processes. Each completion stops at a length drawn from the seed.
* *Settings*: *mbs4* is `--micro_batch_size 4` and *tokens16384* is `--max_tokens_per_micro_batch 16384`. The other
  parts of a setting are its layout, written as for `python -m swift_megatron_grpo.tools.check_layouts`; without
  *shared*, every completion has a copy of its prompt (`--share_prompts false`).
* *MFU*: the FLOPs that forward and backward of these tokens require, divided by the time of forward and backward and by
  the peak bf16 throughput of the GPUs. `training_flops` in `benchmarks/harness/workload.py` counts half of the
  attention scores, the output layer on completion tokens only, and no recomputation. The formula is the same for both.
  Tokens of images count, the image part of a model does not. A prompt that completions share counts once.
* *MFU as verl counts*: by the formula of verl's FLOPs counter, to compare with published figures: all attention
  scores, and embedding and output layer on all tokens. Earlier runs have no figure.
* *Peak*: the maximum memory that PyTorch allocated in the train phase, on the GPU that used most.
* *Images/s*: completions of a step, each of which shows its prompt's image, divided by the seconds of the train phase.
* *Losses* and *gradient norms* are those of the first measured step. On policy the ratio is 1 and the advantages of a
  group sum to 0, so the loss is 0 up to rounding if all completions of a group have the same weight; the gradient norm
  shows that both trainers did the same work. With more than one tensor-parallel rank, ms-swift's gradient norm omits
  some shards (docs/architecture.md). In runs with vLLM each trainer samples its own completions.
"""

WHO_RAN = {
    "trl": """\
The authors of this package ran TRL's `GRPOTrainer`, through `benchmarks/peers/trl_arm.py` and in alternation with the
other trainers; TRL's authors have not reviewed the settings. Prompts, completion lengths, rewards, loss, optimizer and
LoRA are the same, vLLM runs in the training process, and the time is that of the whole step with the weight sync.
`benchmarks/peers/trl_settings.py` has every flag. Without *fp32* in a setting, TRL keeps weights and optimizer state in
bf16, which costs less than the fp32 copies that both Megatron trainers keep.
""",
    "verl": """\
The authors of this package ran verl's trainer with FSDP and vLLM on the same GPU, through
`benchmarks/peers/verl_arm.py` and in alternation with the other trainers; verl's authors have not reviewed the
settings. Prompt and completion lengths, rewards and loss are the same, and the time is that of the whole step with the
weight sync, by verl's own timers. `benchmarks/peers/verl_settings.py` has every override. There is no flash-attn, so
attention is torch's.
""",
}  # by arm; the lines above its tables
SHARED_PROMPTS = """\
## Shared prompts

Seconds of the train phase and peak GB, by tokens of the prompt, tokens of each completion and completions of a group.
"""


def write_page(repository: Path) -> None:
    runs = read_runs(repository)
    (repository / PAGE).write_text(page(runs))
    (repository / PICTURE).write_text(draw(runs))
    for path, marks, text in tables(runs):
        file = repository / path
        file.write_text(with_table(file.read_text(), marks, text))


def read_runs(repository: Path) -> list[Run]:
    return [Run.read(path) for path in sorted(repository.glob(RESULTS))]


def page(runs: Sequence[Run]) -> str:
    sections = [INTRODUCTION, f"![Seconds of a step by phase]({PICTURE.name})\n"]
    for kind, title in (("train", "Train phase"), ("step", "Step")):
        comparisons = [comparison for run in runs if run.kind == kind for comparison in run.comparisons()]
        for what, heading in TITLES.items():
            rows = [comparison for comparison in comparisons if comparison.what == what]
            if rows:
                sections += [f"## {title}: {heading}\n", _ratios(rows), _costs(rows)]
        for arm in PEERS:
            rows = [pair for pair in comparisons if pair.other.arm == arm]
            if rows:
                sections += [f"## {title}: {NAMES[arm]}, each at its best setting\n", WHO_RAN[arm], _tried(arm, rows)]
                sections += [_ratios(rows), _costs(rows)]
    if any(run.shared_and_repeated() for run in runs):
        sections += [SHARED_PROMPTS, shared_prompts(runs)]
    sections += sections_of_gpus(runs)
    sections += ["## Phases\n\nMedian seconds.\n", _phases(runs), "## All settings\n", _all_settings(runs)]
    sections += ["## Runs\n", *map(_describe, runs)]
    return "\n".join(sections)


def tables(runs: Sequence[Run]) -> list[tuple[Path, tuple[str, str], str]]:
    """Return the tables in other files: path, the lines around the table, and the table."""
    return [(README, IN_README, headlines(runs)), (SHARED_PAGE, IN_SHARED_PAGE, shared_prompts(runs))]


def with_table(text: str, marks: tuple[str, str], table: str) -> str:
    begin, end = marks
    before, rest = text.split(begin)
    return before + begin + table + end + rest.split(end)[1]


def headlines(runs: Sequence[Run]) -> str:
    by_name = {run.name: run for run in runs}
    rows = [pair for name in HEADLINES for pair in by_name[name].comparisons() if pair.what == "each at its best"]
    return table(
        {
            "": lambda row: {"train": "train phase", "step": "whole step"}[row.ours.run.kind],
            "model": lambda row: _model(row.ours.run),
            "tokens per completion": lambda row: _in_words(row.ours.run.workload["lengths"]),
            "GPUs": lambda row: _gpus(row.ours),
            "ms-swift": lambda row: f"{row.other.median:.2f} s",
            "this package": lambda row: f"{row.ours.median:.2f} s",
            "speedup": lambda row: f"**{row.ratio:.2f}**",
        },
        rows,
    )


def shared_prompts(runs: Sequence[Run]) -> str:
    """Return the table of this package with and without shared prompts, beside ms-swift's best setting."""
    return table(
        {
            "model": lambda row: _model(row[0].run),
            "prompt / completion / group": lambda row: _lengths(row[0].run),
            "repeated": lambda row: f"{row[1].median:.2f} s",
            "shared": lambda row: f"{row[0].median:.2f} s",
            "over repeated": lambda row: f"**{row[1].median / row[0].median:.2f}**",
            "ms-swift": lambda row: f"{row[2].median:.2f} s ({row[2].setting})",
            "over ms-swift": lambda row: f"**{row[2].median / row[0].median:.2f}**",
            "peak GB: repeated / shared / ms-swift": lambda row: " / ".join(
                f"{side.peak_gb:.1f}" for side in (row[1], row[0], row[2])
            ),
        },
        [(*pair, best) for run in runs for pair in run.shared_and_repeated() if (best := run.best("stock"))],
    )


def _lengths(run: Run) -> str:
    prompt, completion = (_in_words(run.workload[name]) for name in ("prompt_lengths", "lengths"))
    return f"{prompt} / {completion} / {run.workload['generations']}"


def _model(run: Run) -> str:
    size, _, family = run.workload["shape"].partition("-")
    return f"{(family or 'qwen3').capitalize()} {size.upper()}{' LoRA' if 'lora' in run.flags else ''}"


def _in_words(lengths: str) -> str:
    kind, *numbers = lengths.split(":")
    return numbers[0] if kind == "constant" else f"long-tailed, median {numbers[0]}, at most {int(numbers[2]):,}"


def _gpus(measured: Measured) -> str:
    """Return the number of GPUs and the layout, without the part of the setting that sizes micro batches."""
    layout = [part.upper() for part in measured.setting.split("+") if not part.startswith(("mbs", "tokens"))]
    return " ".join([str(measured.run.ranks), *(["as", "+".join(layout)] if layout else [])])


def _ratios(rows: Sequence[Comparison]) -> str:
    columns: dict[str, Callable[[Comparison], str]] = {
        "run": lambda row: row.ours.run.name,
        "this package": lambda row: row.ours.setting,
        "seconds": lambda row: _seconds(row.ours),
        NAMES[rows[0].other.arm]: lambda row: row.other.setting,
        "seconds ": lambda row: _seconds(row.other),
        "ratio": lambda row: f"**{row.ratio:.2f}**",
    }
    if rows[0].ours.run.kind == "step":
        columns["train phase"] = lambda row: _both(row, lambda side: f"{side.train_median:.2f}")
        columns["its ratio"] = lambda row: "-" if row.train_ratio is None else f"{row.train_ratio:.2f}"
    columns |= {
        "goal": lambda row: row.ours.run.goal,
        "losses": lambda row: _both(row, lambda side: f"{side.steps[0].loss:.2e}"),
        "gradient norms": lambda row: _both(row, lambda side: f"{side.steps[0].grad_norm:.4g}"),
    }
    return table(columns, rows)


def _costs(rows: Sequence[Comparison]) -> str:
    """Return a table whose cells have the form `this package / other trainer`."""
    columns: dict[str, Callable[[Comparison], str]] = {
        "run": lambda row: row.ours.run.name,
        "settings": lambda row: f"{row.ours.setting} / {row.other.setting}",
        "tokens/s/device": lambda row: _both(row, lambda side: f"{side.tokens_per_second_per_device:,.0f}"),
        "MFU": lambda row: _both(row, lambda side: _percent(side.mfu)),
        "MFU as verl counts": lambda row: _both(row, lambda side: _percent(side.mfu_as_verl_counts)),
        "peak GB": lambda row: _both(row, lambda side: f"{side.peak_gb:.1f}" if side.peak_gb else "-"),
        "peak ratio": lambda row: f"{row.ours.peak_gb / row.other.peak_gb:.2f}" if row.other.peak_gb else "-",
        "slowest rank / mean": lambda row: _both(row, lambda side: f"{side.imbalance:.3f}"),
    }
    if any(_has_images(row.ours.run) for row in rows):
        columns["images/s"] = lambda row: _both(row, _images_per_second)
    return table(columns, rows)


def _has_images(run: Run) -> bool:
    return SHAPES[run.workload["shape"]].vision is not None


def _images_per_second(measured: Measured) -> str:
    """Return the completions that the train phase trains in a second, each of which shows an image; "-": none does."""
    run = measured.run
    return f"{run.workload['completions'] / measured.train_median:.1f}" if _has_images(run) else "-"


def _phases(runs: Sequence[Run]) -> str:
    rows = [run.measured(*side) for run in runs for arm in ARMS for side in run.compared_settings() if side[0] == arm]
    used = [phase for phase in PHASES if any(row.phase(phase) for row in rows)]
    columns: dict[str, Callable[[Measured], str]] = {
        "run": lambda row: row.run.name,
        "": lambda row: NAMES[row.arm],
        "setting": lambda row: row.setting,
    }
    for phase in used:
        columns[phase.replace("_", " ")] = lambda row, phase=phase: f"{row.phase(phase):.3f}"  # type: ignore[misc]
    return table(columns, rows)


def _all_settings(runs: Sequence[Run]) -> str:
    rows = [run.measured(arm, setting) for run in runs for arm in ARMS for setting in run.settings(arm)]
    return table(
        {
            "run": lambda row: row.run.name,
            "": lambda row: NAMES[row.arm],
            "setting": lambda row: row.setting,
            "seconds": lambda row: _seconds(row) if row.steps else row.run.status(row.arm, row.setting),
            "steps": lambda row: str(len(row.steps)),
            "peak GB": lambda row: f"{row.peak_gb:.1f}" if row.steps and row.peak_gb else "-",
        },
        rows,
    )


def _describe(run: Run) -> str:
    work = run.workload
    tokens = f"{run.prompt_tokens:,} prompt tokens and {run.completion_tokens:,} completion tokens"
    cap = "no memory cap" if run.memory_cap_gb is None else f"at most {run.memory_cap_gb:g} GB of each GPU"
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    return f"""\
**{run.name}**: {run.ranks} x {run.device}; {_model(run)}; {work["completions"]} completions in groups of
{work["generations"]}, lengths {work["lengths"]}, prompts {work["prompt_lengths"]}, seed {work["seed"]}:
{tokens} per step, {run.flops:.3g} FLOPs; {cap}; `{" ".join(run.flags)}`.
{versions}.
"""


def _seconds(measured: Measured) -> str:
    return f"{measured.median:.3f} ({min(measured.seconds):.3f}-{max(measured.seconds):.3f})"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _tried(arm: str, rows: Sequence[Comparison]) -> str:
    """Return the settings of which the best one is in the tables."""
    searches = [f"{row.other.run.name}: {', '.join(row.other.run.settings(arm))}" for row in rows]
    return f"Settings tried, the fastest of which is below: {'; '.join(searches)}.\n"


def _both(row: Comparison, cell: Callable[[Measured], str]) -> str:
    return f"{cell(row.ours)} / {cell(row.other)}"
