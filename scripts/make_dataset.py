"""Make a small jsonl dataset of prompts for the quickstart and for tests.

    python scripts/make_dataset.py --out FILE --rows N --seed S

Every row has one user turn in `messages` and the column `letters`, which the reward of
templates/plugins/letters.py reads.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from pathlib import Path
from typing import Any

REQUESTS = ("Write a word.", "Spell something.", "Say a few letters.", "Type in lower case.", "Name a thing.")


def make_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return rows with different texts and lengths; equal lengths would hide errors in padding and packing."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        words = " ".join(
            "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 7))) for _ in range(rng.randint(0, 6))
        )
        content = f"{number}: {rng.choice(REQUESTS)} {words}".strip()
        rows.append({"messages": [{"role": "user", "content": content}], "letters": string.ascii_lowercase})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="jsonl file to write")
    parser.add_argument("--rows", type=int, default=64, help="number of prompts")
    parser.add_argument("--seed", type=int, default=0, help="the same seed writes the same file")
    args = parser.parse_args()

    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = make_rows(args.rows, args.seed)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{args.out}: {len(rows)} rows")


if __name__ == "__main__":
    main()
