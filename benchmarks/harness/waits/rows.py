"""The dataset of a case: a quarter of its prompts has equal rewards, and random weights get lengths."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.harness.learning.prompts import TASK, read_rows, write_data
from benchmarks.harness.lengths import Lengths
from benchmarks.harness.workload import FILLER

UNIFORM_EVERY = 4  # prompts
ROWS = 2048  # of random weights
TEMPLATE_TOKENS = 64  # of a prompt, at most


def write_rows(folder: Path, prompt_tokens: int, lengths: str, generations: int, turns: int) -> Path:
    """Write rows.jsonl, in the order in which it is read. `lengths`: empty for a released model."""
    write_data(folder, TASK)
    rows = read_rows(folder / "train.jsonl")
    if lengths:
        rows = _rows_with_lengths(prompt_tokens, lengths, generations, turns)
    file = folder / "rows.jsonl"
    marked = ({**row, "uniform": place % UNIFORM_EVERY == 0} for place, row in enumerate(rows))
    file.write_text("".join(json.dumps(row) + "\n" for row in marked))
    return file


def _rows_with_lengths(prompt_tokens: int, lengths: str, generations: int, turns: int) -> list[dict[str, Any]]:
    """Return prompts of almost `prompt_tokens` with the template's; lengths: [completion][turn]."""
    drawn = iter(Lengths(lengths).draw(ROWS * generations * turns, random.Random(0)))
    return [
        {
            "messages": [{"role": "user", "content": f"{place} ".ljust(prompt_tokens - TEMPLATE_TOKENS, FILLER)}],
            "lengths": [[next(drawn) for _ in range(turns)] for _ in range(generations)],
        }
        for place in range(ROWS)
    ]
