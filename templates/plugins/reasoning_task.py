"""A task of reasoning_gym as a dataset and as a reward with the task's own score. Copy this file for your task.

    python reasoning_task.py FOLDER chain_sum '{"max_terms": 3}' "Answer with the number only."

writes FOLDER/train.jsonl and, of other problems, FOLDER/held_out.jsonl for --val_dataset. The reward, with
`--external_plugins reasoning_task.py --reward_funcs reasoning_task`, scores the text in <answer>, or else the whole
completion. ms-swift's `accuracy` reads the column `solution` instead.
"""

import json
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
    own_score = get_score_answer_fn(problem["metadata"]["source_dataset"])
    return float(own_score(extract_answer(text) or text.strip(), problem))


orms["reasoning_task"] = ReasoningTask

if __name__ == "__main__":
    folder, task, settings, instruction = sys.argv[1:]
    made = create_dataset(task, size=8192, seed=0, **json.loads(settings))  # nearby seeds make the same problems
    rows = []
    for question, problem in {problem["question"]: problem for problem in made}.items():
        prompt = {"role": "user", "content": f"{question} {instruction}"}
        rows.append({"messages": [prompt], "solution": problem["answer"], "problem": json.dumps(problem)})
    for name, part in (("held_out", rows[:256]), ("train", rows[256:])):
        Path(folder, f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
