"""SVGs with the seconds of a step by phase.

`draw`: every comparison; the longer bar of each pair has the full width. `draw_headlines`: a few, on one time scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .results import NAMES, PEERS, PHASES, TRAIN_PHASES, Comparison, Measured, Run

COLOURS = {
    "generation": "#4e79a7",
    "switch": "#f28e2b",
    "weight_sync": "#edc948",
    "sync_check": "#ff9da7",
    "grading": "#9c755f",
    "logprobs": "#e15759",
    "forward_backward": "#59a14f",
    "grad_sync": "#b07aa1",
    "optimizer": "#76b7b2",
    "other": "#bab0ac",
}
LABELS, WIDTH, LINE, GAP, TOP = 260, 560, 16, 12, 60


def draw(runs: Sequence[Run]) -> str:
    rows = [comparison for run in runs for comparison in run.comparisons()]
    pair = 3 * LINE + GAP
    body = [_legend(), *(_pair(row, TOP + i * pair) for i, row in enumerate(rows))]
    return document(f'width="{LABELS + WIDTH + 90}" height="{TOP + len(rows) * pair}"', 11, body)


def document(size: str, font: int, body: Sequence[str]) -> str:
    """Return a whole SVG with a white background; `size` is its viewBox, or its width and height."""
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="{font}">'
    return "\n".join([start, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>\n"])


def _legend() -> str:
    elements = []
    for i, phase in enumerate(PHASES):
        x, y = 10 + i % 5 * 150, 12 + i // 5 * 20
        elements.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[phase]}"/>')
        elements.append(f'<text x="{x + 17}" y="{y + 10}">{phase.replace("_", " ")}</text>')
    return "\n".join(elements)


def _pair(row: Comparison, y: int) -> str:
    scale = WIDTH / max(row.ours.median, row.other.median)
    what = f"with {NAMES[row.other.arm]}" if row.other.arm in PEERS else row.what
    title = escape(f"{row.ours.run.name}, {what}: {row.ratio:.2f} times as fast")
    return "\n".join(
        [
            f'<text x="10" y="{y + 12}" font-weight="bold">{title}</text>',
            _bar(row.ours, y + LINE, scale),
            _bar(row.other, y + 2 * LINE, scale),
        ]
    )


def _bar(measured: Measured, y: int, scale: float) -> str:
    """Draw the medians of the phases; they need not add up to the median of the step, which the label shows."""
    label = escape(f"{NAMES[measured.arm]} {measured.setting}")
    elements = [f'<text x="{LABELS - 5}" y="{y + 12}" text-anchor="end">{label}</text>']
    x = float(LABELS)
    for phase in PHASES if measured.run.kind == "step" else TRAIN_PHASES:
        width = measured.phase(phase) * scale
        if width:
            elements.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LINE - 2}" fill="{COLOURS[phase]}">'
                f"<title>{phase} {measured.phase(phase):.3f} s</title></rect>"
            )
        x += width
    elements.append(f'<text x="{x + 5:.1f}" y="{y + 12}">{measured.median:.2f} s</text>')
    return "\n".join(elements)


HEADLINES = {
    "step-best-1.7b": "Qwen3 1.7B, 128 completions",
    "step-lora-8b": "Qwen3 8B LoRA, 64 completions",
    "moe-4.5b-step": "Qwen3-MoE 4.5B, 64 completions",
    "qwen3-vl-2b-lora": "Qwen3-VL 2B LoRA, 64 completions",
}  # of comparisons on one H200, by run
PARTS = {
    "generation": ("generation",),
    "log-probs": ("logprobs",),
    "forward, backward, optimizer": ("forward_backward", "grad_sync", "optimizer"),
    "weight sync, phase switches, rewards": ("switch", "weight_sync", "sync_check", "grading", "other"),
}
PART_COLOURS = ("#4e79a7", "#e15759", "#59a14f", "#bab0ac")
NAME_WIDTH, BAR_WIDTH, BAR, GROUP, HEAD = 110, 560, 22, 86, 34


def draw_headlines(runs: Sequence[Run]) -> str:
    by_name = {run.name: run for run in runs}
    pairs = [
        (title, next(pair for pair in by_name[name].comparisons() if pair.what == "each at its best"))
        for name, title in HEADLINES.items()
        if name in by_name
    ]
    longest = max((max(pair.ours.median, pair.other.median) for _, pair in pairs), default=1.0)
    size = f'viewBox="0 0 {NAME_WIDTH + BAR_WIDTH + 70} {HEAD + len(pairs) * GROUP}"'
    body = [_legend_of_parts()]
    for i, (title, pair) in enumerate(pairs):
        y = HEAD + i * GROUP
        heading = escape(f"{title}: {pair.ratio:.2f} times as fast")
        body.append(f'<text x="{NAME_WIDTH}" y="{y + 14}" font-weight="bold">{heading}</text>')
        scale = BAR_WIDTH / longest
        body += [_parts_bar(pair.other, y + 20, scale), _parts_bar(pair.ours, y + 22 + BAR, scale)]
    return document(size, 13, body)


def _legend_of_parts() -> str:
    elements, x = [], 8
    for part, colour in zip(PARTS, PART_COLOURS, strict=True):
        elements.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{colour}"/>')
        elements.append(f'<text x="{x + 17}" y="21">{escape(part)}</text>')
        x += 34 + 7 * len(part)
    return "\n".join(elements)


def _parts_bar(measured: Measured, y: int, scale: float) -> str:
    elements = [f'<text x="{NAME_WIDTH - 6}" y="{y + 15}" text-anchor="end">{NAMES[measured.arm]}</text>']
    x = float(NAME_WIDTH)
    for phases, colour in zip(PARTS.values(), PART_COLOURS, strict=True):
        width = measured.phase(*phases) * scale
        elements.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{colour}"/>')
        x += width
    elements.append(f'<text x="{x + 5:.1f}" y="{y + 15}">{measured.median:.2f} s</text>')
    return "\n".join(elements)
