"""Plurals of nouns as a dataset, and a reward: 1 for the plural alone, half for another word. Copy it for your task.

    python plurals.py FOLDER

writes FOLDER/train.jsonl and, with other nouns, FOLDER/held_out.jsonl for --val_dataset. Loaded by --external_plugins,
the file registers the reward for `--reward_funcs plural`.
"""

import json
import sys
from pathlib import Path

NOUNS = """
apple arm bag ball bank bear bed bell bird boat book bottle boy bridge brother camera candle car card cat chair clock
cloud coat corner cow cup desk doctor dog door dream duck egg engine eye farm farmer field finger flag flower forest
friend game garden gate girl hand hat heart hill horse house island king lake lamp lawyer leg letter lion map market
mountain nail neck nose number orange parent pen pencil picture pilot pocket queen rabbit river road rock roof room
school ship shirt shop shoe singer sister song spoon star stone street student table teacher tiger tower town train tree
village wall window winter word
"""

if __name__ == "__main__":
    rows = []
    for noun in NOUNS.split():
        question = f"What is the plural of {noun}? Answer with one word."
        rows.append({"messages": [{"role": "user", "content": question}], "solution": f"{noun}s"})
    for name, part in (("held_out", rows[::3]), ("train", rows[1::3] + rows[2::3])):
        Path(sys.argv[1], f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
else:
    from swift.rewards import ORM, orms

    class Plural(ORM):
        def __call__(self, completions: list[str], solution: list[str], **columns: object) -> list[float]:
            words = (text.strip().lower() for text in completions)
            return [(word.isalpha() + (word == right)) / 2 for word, right in zip(words, solution, strict=True)]

    orms["plural"] = Plural
