"""An external plugin: a judge whose score is the number of characters of its answer, and a classifier's plugin."""

from __future__ import annotations

import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from swift.rewards import rm_plugins
from swift.utils import to_device


class Characters:
    def request(self, row: dict[str, Any]) -> dict[str, Any]:
        text = f"How good is this answer? {row['messages'][-1]['content'][:40]}"
        return {"messages": [{"role": "user", "content": text}], "max_tokens": 6, "temperature": 0}

    def score(self, text: str) -> float:
        return float(len(text))


rm_plugins["characters"] = Characters


class Recorded:
    """A plugin of a model in the ranks, as ms-swift's example writes it: with `inputs` alone. It records them."""

    def __init__(self, model: Any, template: Any) -> None:
        self.model, self.template = model, template

    def __call__(self, inputs: list[dict[str, Any]]) -> Any:
        encoded = [self.template.encode(deepcopy(row)) for row in inputs]
        batch = to_device(self.template.data_collator(encoded), self.model.device)
        with torch.inference_mode():
            scores = self.model(**batch).logits[:, 0]
        with Path(os.environ["SCORED"], f"{os.getpid()}.jsonl").open("a") as file:
            for row, tokens, score in zip(inputs, encoded, scores.tolist(), strict=True):
                text = row["messages"][-1]["content"]
                file.write(json.dumps({"text": text, "tokens": tokens["input_ids"], "score": score}) + "\n")
        return scores


rm_plugins["recorded"] = Recorded
