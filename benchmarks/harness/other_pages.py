"""Tables of README.md and of pages other than docs/performance.md, each between two lines that name its origin."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from .cells import both, gpus, has_images, images_per_second, in_words, model, peak, percent
from .markdown import table
from .own_runs import ahead
from .results import NAMES, PEERS, Comparison, Measured, Run

README, IN_README = Path("README.md"), ("<!-- speed, by benchmarks/bench.py report -->\n", "<!-- end of speed -->\n")
OF_PEERS = ("<!-- TRL and verl, by benchmarks/bench.py report -->\n", "<!-- end of TRL and verl -->\n")
MEASURED = ("<!-- measured, by benchmarks/bench.py report -->\n", "<!-- end of measured -->\n")
SHARED_PAGE, IMAGES_PAGE = Path("docs/shared_prompts.md"), Path("docs/multimodal.md")
EXPERTS_PAGE, MODELS_PAGE, SERVERS_PAGE = Path("docs/moe.md"), Path("docs/models.md"), Path("docs/async.md")
HEADLINES = ("step-best-1.7b", "step-lora-8b", "qwen2.5-vl-3b", "moe-4.5b-step", "long-4b")
BEST, PEER = "each at its best", "with a peer"
Columns = dict[str, Callable[[Comparison], str]]


def tables(runs: Sequence[Run]) -> list[tuple[Path, tuple[str, str], str]]:
    """Return the path, the lines around the table, and the table."""
    return [
        (README, IN_README, headlines(runs)),
        (README, OF_PEERS, peers_in_words(runs)),
        (SHARED_PAGE, MEASURED, shared_prompts(runs)),
        (IMAGES_PAGE, MEASURED, with_ms_swift([run for run in runs if has_images(run)])),
        (EXPERTS_PAGE, MEASURED, with_ms_swift([run for run in runs if run.workload["shape"].endswith("-moe")])),
        (SERVERS_PAGE, MEASURED, ahead(runs)),
        (MODELS_PAGE, MEASURED, with_ms_swift([run for run in runs if run.workload["shape"].endswith("-qwen3.5")])),
    ]


def with_table(text: str, marks: tuple[str, str], table: str) -> str:
    begin, end = marks
    before, rest = text.split(begin)
    return before + begin + table + end + rest.split(end)[1]


def headlines(runs: Sequence[Run]) -> str:
    by_name = {run.name: run for run in runs}
    pairs = [pair for name in HEADLINES for pair in by_name[name].comparisons() if pair.what == BEST]
    first: Columns = {"": lambda row: {"train": "train phase", "step": "whole step"}[row.ours.run.kind]}
    return table(first | _columns(), pairs)


def compared(pairs: Sequence[Comparison]) -> str:
    """Return the table of this package and ms-swift."""
    return table(_columns() | {"peak GB": lambda row: f"{peak(row.other)} / {peak(row.ours)}"}, pairs)


def _columns() -> Columns:
    """Return the columns of a comparison, with the speedup where a narrow screen shows it."""
    return {
        "model": lambda row: model(row.ours.run),
        "speedup": lambda row: f"**{row.ratio:.2f}**",
        "ms-swift": lambda row: f"{row.other.median:.2f} s",
        "this package": lambda row: f"{row.ours.median:.2f} s",
        "completions x tokens": lambda row: _work(row.ours.run),
        "GPUs": lambda row: _devices(row.ours),
    }


def _work(run: Run) -> str:
    return f"{run.workload['completions']} x {in_words(run.workload['lengths']).removeprefix('long-tailed, ')}"


def _devices(measured: Measured) -> str:
    served = " and a server" if uses_server(measured.run) else ""
    return gpus(measured) + (" H100" if "H100" in measured.run.device else "") + served


def uses_server(run: Run) -> bool:
    return "server" in run.processes[0].flags


def beside_peers(runs: Sequence[Run]) -> str:
    """Return the table of whole steps next to those of TRL and verl, on H200 where one measured them."""
    pairs = [pair for run in runs for pair in run.comparisons() if pair.what == PEER]
    on_h200 = {_work_beside(pair) for pair in pairs if _on_h200(pair)}
    return table(
        {
            "model": lambda row: model(row.ours.run),
            "speedup": lambda row: f"**{row.ratio:.2f}**",
            "over": lambda row: NAMES[row.other.arm],
            "its step": lambda row: f"{row.other.median:.2f} s",
            "this package": lambda row: f"{row.ours.median:.2f} s",
            "completions x tokens": lambda row: _work(row.ours.run),
            "prompt tokens": lambda row: in_words(row.ours.run.workload["prompt_lengths"]),
            "GPU": lambda row: "H200" if _on_h200(row) else "H100",
        },
        [pair for pair in pairs if _on_h200(pair)]
        + [pair for pair in pairs if not _on_h200(pair) and _work_beside(pair) not in on_h200],
    )


def peers_in_words(runs: Sequence[Run]) -> str:
    """Return the range of speedups over each peer, as a sentence."""
    pairs = [pair for run in runs for pair in run.comparisons() if pair.what == PEER]
    ranges = []
    for arm in PEERS:
        ratios = [pair.ratio for pair in pairs if pair.other.arm == arm]
        ranges += [f"{min(ratios):.2f} to {max(ratios):.2f} times as fast as in {NAMES[arm]}"] if ratios else []
    has_verl = any(pair.other.arm == "verl" for pair in pairs)
    wait = "Up to 2 s of verl's steps are [a wait](docs/performance.md#trl-and-verl).\n" if has_verl else ""
    return f"On the same work, a whole step is {' and '.join(ranges)}.\n{wait}"


def _on_h200(pair: Comparison) -> bool:
    return "H200" in pair.ours.run.device


def _work_beside(pair: Comparison) -> tuple[str, str]:
    return json.dumps(pair.ours.run.workload, sort_keys=True), pair.other.arm


def shared_prompts(runs: Sequence[Run], names: Sequence[str] | None = None, without: Sequence[str] = ()) -> str:
    """Return the table of shared and repeated prompts and of ms-swift's best setting, for all runs or those named."""
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
        [
            (*pair, best)
            for run in runs
            if names is None or run.name in names
            for pair in run.shared_and_repeated()
            if (best := run.best("stock"))
        ],
        without,
    )


def _lengths(run: Run) -> str:
    prompt, completion = (in_words(run.workload[name]) for name in ("prompt_lengths", "lengths"))
    return f"{prompt} / {completion} / {run.workload['generations']}"


def with_ms_swift(runs: Sequence[Run]) -> str:
    """Return the table of a family of models; cells with two figures have the form `this package / ms-swift`."""
    rows = [pair for run in runs for pair in run.comparisons() if pair.what == BEST]
    columns: dict[str, Callable[[Comparison], str]] = {
        "run": lambda row: f"[{row.ours.run.name}](../benchmarks/results/runs.md)",
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
    return "on another GPU" if uses_server(run) else "in the trainer"
