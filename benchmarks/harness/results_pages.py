"""Pages of benchmarks/results: every comparison, phase, setting and run of benchmarks/*/*.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from .cells import both, has_images, images_per_second, model, peak, percent, seconds
from .markdown import table
from .other_pages import shared_prompts
from .own_runs import sections_of_own_runs
from .results import ARMS, NAMES, PEERS, PHASES, Comparison, Measured, Run

FOLDER, INDEX, CHART = Path("benchmarks/results"), Path("benchmarks/README.md"), Path("benchmarks/results/phases.svg")
WRITTEN = (
    "<!-- Written by `python -m benchmarks.bench report` from benchmarks/*/*.json. Do not edit: a test compares it. -->"
)
TITLES = {
    "equal flags": "equal flags",
    "each at its best": "each at its best setting, of those tried under the same memory cap",
    "chosen pair": "chosen pairs of settings",
}
INTRODUCTION = f"""\
# Measurements

{WRITTEN}

Every number of the benchmarks that compare this package with ms-swift's own Megatron GRPO trainer, TRL and verl. The
trainers run the same work on the same machine, with the same random weights, prompts and completion lengths. Their
processes run one at a time, in alternation. Each number is the median over the measured steps, with the minimum and
maximum in brackets. The first steps of each process are warm-up and are not counted.

| page | content |
| --- | --- |
| [train.md](results/train.md) | train phase: this package against ms-swift |
| [step.md](results/step.md) | whole step: this package against ms-swift, TRL and verl |
| [own.md](results/own.md) | settings of this package against each other: servers, layouts, weight syncs, FP8, experts |
| [eight.md](results/eight.md) | one node of eight GPUs: forecasts, not measured yet |
| [phases.md](results/phases.md) | seconds of each phase, as a table and as a chart |
| [settings.md](results/settings.md) | every setting that was tried, also those that failed |
| [runs.md](results/runs.md) | workload, versions and flags of each run |

[docs/performance.md](../docs/performance.md) is the summary. `python -m benchmarks.bench train --help` describes how to
measure, and `benchmarks/bench_h200.sh` repeats all measurements on H200.

## Terms

* *Train phase*: all log-prob passes, forward and backward, gradient reduction and the optimizer. In these runs the
  completions are generated from a seed, with the same tokens for both trainers, and vLLM does not start.
* *Step*: everything, with vLLM in the training processes. Each completion stops at a length drawn from the seed.
* *Settings*: *mbs4* is `--micro_batch_size 4` and *tokens16384* is `--max_tokens_per_micro_batch 16384`. The other
  parts of a setting are its layout, written as for `swift-megatron-grpo check-layouts`; without
  *shared*, every completion has a copy of its prompt (`--share_prompts false`).
* *MFU*: the FLOPs that forward and backward of these tokens require, divided by the time of forward and backward and by
  the peak bf16 throughput of the GPUs. `training_flops` in `benchmarks/harness/workload.py` counts half of the
  attention scores, the output layer on completion tokens only, and no recomputation. The formula is the same for both.
  Tokens of images count, the vision tower does not. A prompt that completions share counts once.
* *MFU as verl counts*: by the formula of verl's FLOPs counter, to compare with published figures: all attention
  scores, and embedding and output layer on all tokens. Earlier runs have no figure.
* *Peak*: the maximum memory that PyTorch allocated in the train phase, on the GPU that used most. It includes a vLLM
  that stays awake, but not one that sleeps, except in earlier runs, which did not record how much of it was asleep.
* *Images/s*: completions of a step, each of which shows its prompt's image, divided by the seconds of the train phase.
* *Losses* and *gradient norms* are those of the first measured step. On policy the ratio is 1 and the advantages of a
  group sum to 0, so the loss is 0 up to rounding if all completions of a group have the same weight. The gradient norm
  shows that both trainers did the same work. With more than one tensor-parallel rank, ms-swift's gradient norm
  [omits some shards](../docs/what_is_patched.md#upstream-bugs-that-are-fixed-here). In runs with vLLM each trainer
  samples its own completions. Models before revision 5f8e02c had a padding token whose embedding is zero. Where a
  random completion contains it, RMSNorm amplifies the gradient of that row, and norms of both Megatron trainers rise
  from 1.8 to 60; transformers drops this gradient.
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
attention is torch's. verl 0.9.1 looks every 2 s whether a rollout is complete, and up to 2 s of these steps are that
wait; `benchmarks/peers/verl_sampler.py` shortens it in runs that are measured from now on.
""",
}  # by arm; the lines above its tables
SHARED = """\
## Shared prompts

Seconds of the train phase and peak GB, by tokens of the prompt, tokens of each completion and completions of a group.
"""


def pages(runs: Sequence[Run]) -> dict[Path, str]:
    """Return the text of every page, by its path in the repository."""
    sections = {
        "train": ["Train phase", *_compared(runs, "train", "Train phase")],
        "step": ["Whole step", *_compared(runs, "step", "Step")],
        "own": ["Settings of this package", SHARED, shared_prompts(runs), *sections_of_own_runs(runs)],
        "phases": ["Phases", f"![Seconds of a step by phase]({CHART.name})\n", "Median seconds.\n", _phases(runs)],
        "settings": ["All settings", _all_settings(runs)],
        "runs": ["Runs", *map(_describe, runs)],
    }
    texts = {FOLDER / f"{name}.md": _page(title, texts) for name, (title, *texts) in sections.items()}
    return {INDEX: INTRODUCTION, **texts}


def _page(title: str, sections: Sequence[str]) -> str:
    terms = "[Terms](../README.md#terms) are explained with the method.\n"
    return "\n".join([f"# {title}\n", f"{WRITTEN}\n", terms, *sections])


def _compared(runs: Sequence[Run], kind: str, title: str) -> list[str]:
    sections: list[str] = []
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
    return sections


def _ratios(rows: Sequence[Comparison]) -> str:
    columns: dict[str, Callable[[Comparison], str]] = {
        "run": lambda row: row.ours.run.name,
        "ratio": lambda row: f"**{row.ratio:.2f}**",
        "this package": lambda row: row.ours.setting,
        "seconds": lambda row: seconds(row.ours),
        NAMES[rows[0].other.arm]: lambda row: row.other.setting,
        "seconds ": lambda row: seconds(row.other),
    }
    if rows[0].ours.run.kind == "step":
        columns["train phase"] = lambda row: both(row, lambda side: f"{side.train_median:.2f}")
        columns["its ratio"] = lambda row: "-" if row.train_ratio is None else f"{row.train_ratio:.2f}"
    columns |= {
        "goal": lambda row: row.ours.run.goal,
        "losses": lambda row: both(row, lambda side: f"{side.steps[0].loss:.2e}"),
        "gradient norms": lambda row: both(row, lambda side: f"{side.steps[0].grad_norm:.4g}"),
    }
    return table(columns, rows)


def _costs(rows: Sequence[Comparison]) -> str:
    """Return a table whose cells have the form `this package / other trainer`."""
    columns: dict[str, Callable[[Comparison], str]] = {
        "run": lambda row: row.ours.run.name,
        "settings": lambda row: f"{row.ours.setting} / {row.other.setting}",
        "tokens/s/device": lambda row: both(row, lambda side: f"{side.tokens_per_second_per_device:,.0f}"),
        "MFU": lambda row: both(row, lambda side: percent(side.mfu)),
        "MFU as verl counts": lambda row: both(row, lambda side: percent(side.mfu_as_verl_counts)),
        "peak GB": lambda row: both(row, peak),
        "peak ratio": lambda row: f"{row.ours.peak_gb / row.other.peak_gb:.2f}" if row.other.peak_gb else "-",
        "slowest rank / mean": lambda row: both(row, lambda side: f"{side.imbalance:.3f}"),
    }
    if any(has_images(row.ours.run) for row in rows):
        columns["images/s"] = lambda row: both(row, images_per_second)
    return table(columns, rows)


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
            "seconds": lambda row: seconds(row) if row.steps else row.run.status(row.arm, row.setting),
            "steps": lambda row: str(len(row.steps)),
            "peak GB": lambda row: peak(row) if row.steps else "-",
        },
        rows,
    )


def _describe(run: Run) -> str:
    work = run.workload
    tokens = f"{run.prompt_tokens:,} prompt tokens and {run.completion_tokens:,} completion tokens"
    cap = "no memory cap" if run.memory_cap_gb is None else f"at most {run.memory_cap_gb:g} GB of each GPU"
    allocator = f", `PYTORCH_CUDA_ALLOC_CONF={run.allocator}`" if run.allocator else ""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    return f"""\
**{run.name}**: {run.ranks} x {run.device}; {model(run)}; {work["completions"]} completions in groups of
{work["generations"]}, lengths {work["lengths"]}, prompts {work["prompt_lengths"]}, seed {work["seed"]}:
{tokens} per step, {run.flops:.3g} FLOPs; {cap}; `{" ".join(run.flags)}`{allocator}.
{versions}.
"""


def _tried(arm: str, rows: Sequence[Comparison]) -> str:
    """Return the settings of which the best one is in the tables."""
    searches = [f"{row.other.run.name}: {', '.join(row.other.run.settings(arm))}" for row in rows]
    return f"Settings tried, the fastest of which is below: {'; '.join(searches)}.\n"
