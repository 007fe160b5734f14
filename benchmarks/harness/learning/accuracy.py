"""Measure greedy held-out accuracy of checkpoints: `python -m benchmarks.harness.learning.accuracy --help`.

All trainers' checkpoints are measured by this program, with vLLM in the same precision. Configuration, tokenizer, chat
template and end of a completion are those of the model before training, so only the weights of a checkpoint are read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.learning.prompts import read_rows, tokens_of_peers
from benchmarks.harness.learning.reward import score
from benchmarks.harness.scoring_engine import scoring_engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path, help="model before training, which is measured first")
    parser.add_argument("checkpoints", type=Path, nargs="*")
    parser.add_argument("--rows", type=Path, required=True, help="held_out.jsonl")
    parser.add_argument("--max-tokens", type=int, required=True, help="of a completion")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--json", type=Path, required=True, help="file for the results, one per model")
    args = parser.parse_args()
    rows = read_rows(args.rows)
    args.json.write_text(json.dumps([result_of(texts, rows) for texts in generate(args, rows)]) + "\n")


def generate(args: argparse.Namespace, rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the completions of each model. One engine serves all, because its start takes longer than a model."""
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(args.base)
    prompts = [tokens_of_peers(tokenizer, row["messages"]) for row in rows]
    llm = scoring_engine(args.base, args.dtype, max(map(len, prompts)) + args.max_tokens)
    sampling = SamplingParams(temperature=0, max_tokens=args.max_tokens, stop_token_ids=[tokenizer.eos_token_id])
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    for model in (args.base, *args.checkpoints):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})
        yield [request.outputs[0].text for request in llm.generate(requests, sampling, use_tqdm=False)]


def result_of(texts: list[str], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the share of solved problems."""
    scores = [score(text, row["solution"]) for text, row in zip(texts, rows, strict=True)]
    return {"accuracy": round(sum(scores) / len(scores), 4), "problems": len(scores), "samples": texts[:3]}


if __name__ == "__main__":
    main()
