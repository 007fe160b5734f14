"""The table of docs/speculation.md: what rows of drafts cost, from the JSON file of benchmarks/bench_draft_rows.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .markdown import lines_of

FILE = Path("benchmarks/h200/parts/draft-rows.json")
PAGE = Path("docs/speculation.md")
MARKS = ("<!-- draft rows, by benchmarks/bench.py report -->\n", "<!-- end of draft rows -->\n")
NAMES = {"1.7b": "1.7B", "8b": "8B", "30b-qwen3-moe": "30B-A3B"}


def with_draft_prices(repository: Path) -> tuple[Path, tuple[str, str], str]:
    """Return the page, the lines around the table, and the table."""
    return PAGE, MARKS, text_of(json.loads((repository / FILE).read_text()))


def text_of(results: dict[str, Any]) -> str:
    """Return how much longer than without drafts a step of the second runner takes, by running requests and depth."""
    longer = {
        (row["shape"], row["running"], row["depth"]): f"{row['step'] - 1:+.0%}"
        for row in results["prices"]
        if row["arm"] == "v2-drafts"
    }
    engines = [(shape, depth) for shape in NAMES for depth in (2, 4)]
    head = ["running", *(f"{NAMES[shape]}, {depth} drafts" for shape, depth in engines)]
    rows = [
        [str(running), *(longer.get((shape, running, depth), "not measured") for shape, depth in engines)]
        for running in sorted(results["running"])
    ]
    return lines_of([head, *rows]) + "\n"
