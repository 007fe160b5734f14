r"""Put four answered problems before each question of the rows that reasoning_task.py has written.

    python worked_examples.py FOLDER '{metadata[expression]} = {answer}. The answer is \boxed{{{answer}}}.'

They are earlier turns of the conversation, with answers of this form. Its fields are those of a problem of
reasoning_gym. The four leave FOLDER/train.jsonl.
"""

import json
import sys
from pathlib import Path
from typing import Any

EXAMPLES = 4


def answered(row: dict[str, Any], form: str) -> list[dict[str, str]]:
    return [*row["messages"], {"role": "assistant", "content": form.format(**json.loads(row["problem"]))}]


if __name__ == "__main__":
    folder, form = sys.argv[1:]
    files = [Path(folder, f"{name}.jsonl") for name in ("train", "held_out")]
    train, held_out = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    shown = train[len(train) // 8 :: len(train) // EXAMPLES][:EXAMPLES]
    turns = [turn for row in shown for turn in answered(row, form)]
    for file, rows in zip(files, ([row for row in train if row not in shown], held_out), strict=True):
        new = ({**row, "messages": [*turns, *row["messages"]]} for row in rows)
        file.write_text("".join(json.dumps(row) + "\n" for row in new))
