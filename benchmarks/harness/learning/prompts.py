"""The dataset, and the check that all trainers make the same tokens of its prompts."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from .settings import MODEL_TYPE, TEMPLATE

# SmolLM2's chat template adds this text where a conversation has no system prompt, and ms-swift's chatml adds none.
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTION = "State the final answer to the following arithmetic problem: {} = Answer with the number only."
DRAWN, HELD_OUT = 8192, 1024  # problems; those that are drawn twice count once


@dataclass(frozen=True)
class Problems:
    """Sums and differences of random numbers; all terms of a problem have the same number of digits."""

    terms: tuple[int, int]  # fewest and most
    digits: tuple[int, int]  # fewest and most
    seed: int
    without: Problems | None = None  # what they draw is left out

    def __str__(self) -> str:
        terms, digits = (" or ".join(map(str, sorted(set(ends)))) for ends in (self.terms, self.digits))
        return f"terms: {terms}; digits: {digits}; seed of the generator: {self.seed}"

    def draw(self) -> dict[str, int]:
        """Return solutions by their problems."""
        generator = random.Random(self.seed)
        left_out = self.without.draw() if self.without else {}
        solutions = {}
        for _ in range(DRAWN):
            terms, digits = generator.randint(*self.terms), generator.randint(*self.digits)
            values = [generator.randrange(10 ** (digits - 1), 10**digits) for _ in range(terms)]
            signs = [1, *generator.choices((1, -1), k=terms - 1)]
            parts = [f"{'+' if sign > 0 else '-'} {value}" for sign, value in zip(signs, values, strict=True)]
            problem = " ".join(parts).removeprefix("+ ")
            if problem not in left_out:
                solutions[problem] = sum(sign * value for sign, value in zip(signs, values, strict=True))
        return solutions


TASK = Problems(terms=(2, 3), digits=(1, 2), seed=0)
# For the choice of settings: as hard as those of the page, because four terms of one digit taught nothing in 150 steps.
SEARCH = Problems(terms=(2, 3), digits=(1, 2), seed=1, without=TASK)


def write_data(folder: Path, problems: Problems) -> None:
    """Write train.jsonl and held_out.jsonl, which have no problem in common."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION.format(problem)}],
            "solution": str(solution),
        }
        for problem, solution in problems.draw().items()
    ]
    for name, part in (("held_out", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


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
