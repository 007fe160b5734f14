"""Measure greedy held-out accuracy of a checkpoint: `python -m benchmarks.harness.learning.accuracy --help`.

All trainers' checkpoints are measured by this program, with vLLM in the same precision. Tokenizer, chat template and
end of a completion are those of the model before training, so what a trainer saves next to the weights has no effect.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.learning.prompts import read_rows, tokens_of_peers
from swift_megatron_grpo.platforms import cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--base", type=Path, required=True, help="model before training, whose tokenizer is used")
    parser.add_argument("--rows", type=Path, required=True, help="held_out.jsonl")
    parser.add_argument("--max-tokens", type=int, required=True, help="of a completion")
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        cpu.activate()
    texts, rows = generate(args), read_rows(args.rows)
    whole = args.json.with_suffix(f".{os.getpid()}")  # another GPU's run may measure or read the same model
    whole.write_text(json.dumps(result_of(texts, rows)) + "\n")
    whole.rename(args.json)


def generate(args: argparse.Namespace) -> list[str]:
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(args.base)
    prompts = [tokens_of_peers(tokenizer, row["messages"]) for row in read_rows(args.rows)]
    llm = LLM(
        str(args.checkpoint),
        tokenizer=str(args.base),
        dtype="bfloat16",
        max_model_len=max(map(len, prompts)) + args.max_tokens,
        gpu_memory_utilization=0.3,
        enforce_eager=True,
        generation_config="vllm",
        seed=0,
    )
    sampling = SamplingParams(temperature=0, max_tokens=args.max_tokens, stop_token_ids=[tokenizer.eos_token_id])
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [request.outputs[0].text for request in llm.generate(requests, sampling, use_tqdm=False)]


def result_of(texts: list[str], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the share of completions with the full score, and the mean score, which has parts of a point."""
    from templates.plugins.reasoning_task import score

    scores = [score(text, json.loads(row["problem"])) for text, row in zip(texts, rows, strict=True)]
    return {
        "accuracy": sum(one == 1 for one in scores) / len(scores),
        "score": round(sum(scores) / len(scores), 4),
        "problems": len(scores),
        "samples": texts[:3],
    }


if __name__ == "__main__":
    main()
