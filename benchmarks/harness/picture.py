"""SVG with the seconds of a step by phase for the trainers; the longer bar of each pair has the full width."""

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
    size = f'width="{LABELS + WIDTH + 90}" height="{TOP + len(rows) * pair}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
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
