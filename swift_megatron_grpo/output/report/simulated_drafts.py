"""Reads what `swift-megatron-grpo simulate-drafts RUN` has left in the folder of a run, for the head of its page."""

import json
from pathlib import Path
from typing import Any

FILE = "simulated_drafts.json"
_MOST_DEPTHS = 8


def saved_steps(folder: Path) -> str | None:
    """Return the share of decode steps that each number of drafts would have saved; None without a readable file."""
    try:
        rows = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        return None
    steps: dict[int, int] = {}
    for row in rows:
        steps[row["depth"]] = steps.get(row["depth"], 0) + row["steps"]
    depths = sorted(steps.keys() - {0})[:_MOST_DEPTHS]
    if not steps.get(0) or not depths:
        return None
    return ", ".join(f"{1 - steps[depth] / steps[0]:.0%} with {depth}" for depth in depths)


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and all(type(row.get(n)) is int and 0 <= row[n] < 2**53 for n in ("depth", "steps"))
