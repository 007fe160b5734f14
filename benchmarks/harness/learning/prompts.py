"""The dataset, and the check that all trainers make the same tokens of its prompts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from .settings import MODEL_TYPE, PLUGIN, TEMPLATE

TASK, TASK_SETTINGS = "chain_sum", {"max_terms": 3, "max_digits": 2}
INSTRUCTION = "Answer with the number only."
# SmolLM2's chat template adds this text where a conversation has no system prompt, and ms-swift's chatml adds none.
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def write_data(folder: Path) -> None:
    """Write train.jsonl and held_out.jsonl, which have no problem in common."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(PLUGIN), str(folder), TASK, json.dumps(TASK_SETTINGS), INSTRUCTION]
    subprocess.run(command, check=True)
    for file in (folder / "train.jsonl", folder / "held_out.jsonl"):
        rows = read_rows(file)
        for row in rows:
            row["messages"].insert(0, {"role": "system", "content": SYSTEM})
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def tokens_of_peers(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> list[int]:
    """Return the prompt as TRL and verl make it, by the tokenizer's own chat template."""
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def differing_prompts(model: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows whose prompt ms-swift's template and that of the tokenizer encode differently."""
    from swift.model import get_processor
    from swift.template import get_template

    tokenizer = get_processor(str(model), model_type=MODEL_TYPE)
    template = get_template(tokenizer, template_type=TEMPLATE)
    template.set_mode("vllm")
    return [
        row
        for row in rows
        if list(template.encode({"messages": row["messages"]})["input_ids"])
        != tokens_of_peers(tokenizer, row["messages"])
    ]
