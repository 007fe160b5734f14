"""Tables of README.md and of pages other than docs/performance.md, each between two lines that name its origin."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from .cells import both, gpus, has_images, images_per_second, in_words, model, peak, percent
from .markdown import table
from .results import NAMES, Comparison, Run

README, IN_README = Path("README.md"), ("<!-- speed, by benchmarks/bench.py report -->\n", "<!-- end of speed -->\n")
OF_PEERS = ("<!-- TRL and verl, by benchmarks/bench.py report -->\n", "<!-- end of TRL and verl -->\n")
MEASURED = ("<!-- measured, by benchmarks/bench.py report -->\n", "<!-- end of measured -->\n")
SHARED_PAGE, IMAGES_PAGE = Path("docs/shared_prompts.md"), Path("docs/multimodal.md")
EXPERTS_PAGE, MODELS_PAGE = Path("docs/moe.md"), Path("docs/models.md")
HEADLINES = ("step-best-1.7b", "step-lora-8b", "fixed-1.7b", "long-0.6b", "long-1.7b", "long-4b", "dp4-1.7b",
             "pp2-1.7b", "tp2-1.7b", "moe-4.5b", "qwen2.5-vl-3b", "qwen3-vl-2b-lora")  # fmt: skip
BEST, PEER = "each at its best", "with a peer"


def tables(runs: Sequence[Run]) -> list[tuple[Path, tuple[str, str], str]]:
    """Return the path, the lines around the table, and the table."""
    return [
        (README, IN_README, headlines(runs)),
        (README, OF_PEERS, beside_peers(runs)),
        (SHARED_PAGE, MEASURED, shared_prompts(runs)),
        (IMAGES_PAGE, MEASURED, with_ms_swift([run for run in runs if has_images(run)])),
        (EXPERTS_PAGE, MEASURED, with_ms_swift([run for run in runs if run.workload["shape"].endswith("-moe")])),
        (MODELS_PAGE, MEASURED, with_ms_swift([run for run in runs if run.workload["shape"].endswith("-qwen3.5")])),
    ]


def with_table(text: str, marks: tuple[str, str], table: str) -> str:
    begin, end = marks
    before, rest = text.split(begin)
    return before + begin + table + end + rest.split(end)[1]


def headlines(runs: Sequence[Run]) -> str:
    by_name = {run.name: run for run in runs}
    rows = [pair for name in HEADLINES for pair in by_name[name].comparisons() if pair.what == BEST]
    return table(
        {
            "": lambda row: {"train": "train phase", "step": "whole step"}[row.ours.run.kind],
            "model": lambda row: model(row.ours.run),
            "completions": lambda row: str(row.ours.run.workload["completions"]),
            "tokens of each": lambda row: in_words(row.ours.run.workload["lengths"]),
            "GPUs": lambda row: gpus(row.ours),
            "ms-swift": lambda row: f"{row.other.median:.2f} s",
            "this package": lambda row: f"{row.ours.median:.2f} s",
            "speedup": lambda row: f"**{row.ratio:.2f}**",
        },
        rows,
    )


def beside_peers(runs: Sequence[Run]) -> str:
    """Return the table of whole steps beside those of TRL and verl, on H200 where one measured them."""
    pairs = [pair for run in runs for pair in run.comparisons() if pair.what == PEER]
    on_h200 = {_work_beside(pair) for pair in pairs if _on_h200(pair)}
    return table(
        {
            "model": lambda row: model(row.ours.run),
            "completions": lambda row: str(row.ours.run.workload["completions"]),
            "prompt tokens": lambda row: in_words(row.ours.run.workload["prompt_lengths"]),
            "tokens of each": lambda row: in_words(row.ours.run.workload["lengths"]),
            "GPU": lambda row: "H200" if _on_h200(row) else "H100",
            "beside": lambda row: NAMES[row.other.arm],
            "its step": lambda row: f"{row.other.median:.2f} s",
            "this package": lambda row: f"{row.ours.median:.2f} s",
            "speedup": lambda row: f"**{row.ratio:.2f}**",
        },
        [pair for pair in pairs if _on_h200(pair)]
        + [pair for pair in pairs if not _on_h200(pair) and _work_beside(pair) not in on_h200],
    )


def _on_h200(pair: Comparison) -> bool:
    return "H200" in pair.ours.run.device


def _work_beside(pair: Comparison) -> tuple[str, str]:
    return json.dumps(pair.ours.run.workload, sort_keys=True), pair.other.arm


def shared_prompts(runs: Sequence[Run]) -> str:
    """Return the table of this package with and without shared prompts, beside ms-swift's best setting."""
    return table(
        {
            "model": lambda row: model(row[0].run),
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
    prompt, completion = (in_words(run.workload[name]) for name in ("prompt_lengths", "lengths"))
    return f"{prompt} / {completion} / {run.workload['generations']}"


def with_ms_swift(runs: Sequence[Run]) -> str:
    """Return the table of a family of models; cells with two figures have the form `this package / ms-swift`."""
    rows = [pair for run in runs for pair in run.comparisons() if pair.what == BEST]
    columns: dict[str, Callable[[Comparison], str]] = {
        "run": lambda row: f"[{row.ours.run.name}](performance.md)",
        "vLLM": lambda row: _engine(row.ours.run),
        "train phase": lambda row: f"{both(row, lambda side: f'{side.train_median:.2f}')} s",
        "ratio": lambda row: f"**{row.train_ratio:.2f}**",
        "whole step": lambda row: f"{both(row, lambda side: f'{side.median:.2f}')} s" if _whole(row) else "-",
        "its ratio": lambda row: f"**{row.ratio:.2f}**" if _whole(row) else "-",
        "MFU": lambda row: both(row, lambda side: percent(side.mfu)),
        "peak GB": lambda row: both(row, peak),
    }
    if any(has_images(row.ours.run) for row in rows):
        columns["images/s"] = lambda row: both(row, images_per_second)
    return table(columns, rows)


def _whole(row: Comparison) -> bool:
    return row.ours.run.kind == "step"


def _engine(run: Run) -> str:
    if run.kind == "train":
        return "does not run"
    return "on another GPU" if "server" in run.processes[0].flags else "in the trainer"
