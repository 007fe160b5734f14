"""docs/learning.svg: reward and accuracy over steps and over seconds, as lines of means in bands of seeds. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.harness.chart import COLOURS, document
from benchmarks.harness.results import ARMS, NAMES

from .bands import Point

COLOUR_OF = dict(zip(ARMS, (COLOURS[name] for name in ("generation", "switch", "forward_backward", "logprobs")),
                     strict=True))  # fmt: skip
PLOT, HEIGHT, LEFT, TOP, GAP, BELOW = 360, 240, 46, 40, 60, 70
TICKS = 4
_AXES: dict[str, Callable[[Point], float | None]] = {
    "step": lambda point: point.step,
    "second": lambda point: point.seconds,
}


def draw(rewards: Mapping[str, Sequence[Point]], accuracies: Mapping[str, Sequence[Point]]) -> str:
    rows = [("reward", rewards), ("held-out accuracy", accuracies)]
    shown = [arm for arm in rewards if rewards[arm]]
    panels = [
        _panel(lines, f"{name} over {axis}s", (column, row))
        for row, (name, bands) in enumerate(rows)
        for column, (axis, of) in enumerate(_AXES.items())
        if (lines := {arm: _line(bands[arm], of) for arm in shown if bands[arm] and None not in map(of, bands[arm])})
    ]
    size = f'viewBox="0 0 {LEFT + 2 * PLOT + GAP + 20} {TOP + 2 * HEIGHT + BELOW + 46}"'
    return document(size, 13, [_legend(shown), *panels])


def _legend(arms: Sequence[str]) -> str:
    elements, x = [], LEFT
    for arm in arms:
        elements.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{COLOUR_OF[arm]}"/>')
        elements.append(f'<text x="{x + 17}" y="21">{NAMES[arm]}</text>')
        x += 42 + 8 * len(NAMES[arm])
    return "\n".join(elements)


def _line(points: Sequence[Point], of: Callable[[Point], float | None]) -> list[tuple[float, Point]]:
    return [(x, point) for point in points if (x := of(point)) is not None]


def _panel(lines: Mapping[str, Sequence[tuple[float, Point]]], title: str, place: tuple[int, int]) -> str:
    """Draw a band and a line for each trainer; `place` is the panel's column and row."""
    last = max(x for line in lines.values() for x, _ in line)
    top = max(point.high for line in lines.values() for _, point in line) or 1.0
    left, bottom = LEFT + place[0] * (PLOT + GAP), TOP + HEIGHT + place[1] * (HEIGHT + BELOW)

    def at(x: float, value: float) -> str:
        return f"{left + x / last * PLOT:.1f},{bottom - value / top * HEIGHT:.1f}"

    elements = [f'<text x="{left + PLOT / 2:.0f}" y="{bottom + 38}" text-anchor="middle">{title}</text>']
    for tick in range(TICKS + 1):
        column, y = left + tick * PLOT / TICKS, bottom - tick * HEIGHT / TICKS
        elements += [
            f'<line x1="{left}" y1="{y:.1f}" x2="{left + PLOT}" y2="{y:.1f}" stroke="#ddd"/>',
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{top * tick / TICKS:.2f}</text>',
            f'<text x="{column:.1f}" y="{bottom + 18}" text-anchor="middle">{last * tick / TICKS:.0f}</text>',
        ]
    for arm, line in lines.items():
        edge = [*(at(x, point.low) for x, point in line), *(at(x, point.high) for x, point in reversed(line))]
        means = " ".join(at(x, point.mean) for x, point in line)
        elements.append(f'<polygon points="{" ".join(edge)}" fill="{COLOUR_OF[arm]}" fill-opacity="0.2"/>')
        elements.append(f'<polyline points="{means}" fill="none" stroke="{COLOUR_OF[arm]}" stroke-width="2"/>')
    return "\n".join(elements)
