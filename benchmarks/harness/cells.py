"""Texts of a run, of one measured setting and of two compared ones, as tables show them."""

from __future__ import annotations

from collections.abc import Callable

from .results import SHARED, Comparison, Measured, Run
from .shapes import SHAPES


def model(run: Run) -> str:
    size, _, family = run.workload["shape"].partition("-")
    name = (family or "qwen3").capitalize().replace("-moe", "-MoE").replace("-vl", "-VL")
    return f"{name} {size.upper()}{' LoRA' if 'lora' in run.flags else ''}"


def in_words(lengths: str) -> str:
    kind, *numbers = lengths.split(":")
    if kind == "lognormal":
        return f"long-tailed, median {numbers[0]}, at most {int(numbers[2]):,}"
    return numbers[0] if kind == "constant" else f"{numbers[0]}, and one of {int(numbers[0]) * int(numbers[1]):,}"


def gpus(measured: Measured) -> str:
    """Return the number of GPUs and the layout, without the part of the setting that sizes micro batches."""
    layout = [
        part.upper()
        for part in measured.setting.split("+")
        if not part.startswith(("mbs", "tokens", SHARED.strip("+")))
    ]
    return " ".join([str(measured.run.ranks), *(["as", "+".join(layout)] if layout else [])])


def seconds(measured: Measured) -> str:
    return f"{measured.median:.3f} ({min(measured.seconds):.3f}-{max(measured.seconds):.3f})"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def peak(measured: Measured) -> str:
    return f"{measured.peak_gb:.1f}" if measured.peak_gb else "-"


def both(row: Comparison, cell: Callable[[Measured], str]) -> str:
    return f"{cell(row.ours)} / {cell(row.other)}"


def has_images(run: Run) -> bool:
    return SHAPES[run.workload["shape"]].image_tokens > 0


def images_per_second(measured: Measured) -> str:
    """Return the completions that the train phase trains in a second, each of which shows an image; "-": none does."""
    run = measured.run
    return f"{run.workload['completions'] / measured.train_median:.1f}" if has_images(run) else "-"
