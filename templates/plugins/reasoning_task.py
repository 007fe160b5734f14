"""A task of reasoning_gym as a dataset and as a reward with the task's own score. Copy this file for your task.

    python reasoning_task.py FOLDER chain_sum '{"max_terms": 3}' "Answer with the number only."

writes FOLDER/train.jsonl and, of other problems, FOLDER/held_out.jsonl for --val_dataset. `--reward_funcs
reasoning_task` scores what is in <answer>, or the last number or word if the solution is one, or else the whole text.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from reasoning_gym import create_dataset, get_score_answer_fn
from reasoning_gym.utils import extract_answer
from swift.rewards import ORM, orms


class ReasoningTask(ORM):
    def __call__(self, completions: list[str], problem: list[str], **columns: Any) -> list[float]:
        return [score(text, json.loads(row)) for text, row in zip(completions, problem, strict=True)]


def score(text: str, problem: dict[str, Any]) -> float:
    form = next(f for f in (r"-?[\d.]*\d", "[A-Za-z]+", "(?s).+") if re.fullmatch(f, problem["answer"] or "-"))
    answer = extract_answer(text) or (re.findall(form, text.strip()) or [""])[-1]
    return float(get_score_answer_fn(problem["metadata"]["source_dataset"])(answer, problem))


orms["reasoning_task"] = ReasoningTask

if __name__ == "__main__":
    folder, task, settings, instruction = sys.argv[1:]
    made = {row["question"]: row for row in create_dataset(task, size=8192, seed=0, **json.loads(settings))}
    rows = [{"messages": [{"role": "user", "content": f"{question} {instruction}".strip()}], "solution": row["answer"],
             "problem": json.dumps(row)} for question, row in made.items()]  # fmt: skip
    held_out, train = rows[::16], [row for place, row in enumerate(rows) if place % 16]  # easy problems come first
    for name, part in {"held_out": held_out, "train": train}.items():  # nearby seeds make the same problems
        Path(folder, f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
