"""Measure verl on a job of bench.py: `python -m benchmarks.peers.verl_arm FLAG... OVERRIDE...`, started by bench.py.

Writes the prompts as verl reads them, runs verl.trainer.main_ppo, which starts Ray, and converts the metrics it logs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.harness.instrument.process import wait_for_turn
from benchmarks.harness.job import Job
from benchmarks.harness.workload import FILLER
from benchmarks.peers import verl_reward
from benchmarks.peers.verl_results import result_of
from benchmarks.peers.verl_settings import ENVIRONMENT, verl_paths


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True, help="dataset of bench.py, JSON lines")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("overrides", nargs="+", help="of verl's configuration")
    return parser.parse_intermixed_args()


def write_rows(path: Path, contents: list[str], prompt_tokens: list[int], tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the dataset as Parquet. verl uses the model's chat template; fillers make up for what ms-swift's adds."""
    rows = []
    for content, wanted in zip(contents, prompt_tokens, strict=True):
        turn = [{"role": "user", "content": content}]
        tokens = len(tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"])
        if tokens > wanted:
            raise ValueError(f"the prompt has {tokens} tokens with the model's chat template, more than {wanted}")
        turn[0]["content"] += FILLER * (wanted - tokens)
        rows.append({"data_source": "benchmark", "prompt": turn, "reward_model": {"ground_truth": ""}})
    Dataset.from_list(rows).to_parquet(path)


def main() -> None:
    args, job = parse(), Job.read()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    contents = [json.loads(line)["messages"][-1]["content"] for line in args.rows.read_text().splitlines()]
    rows, metrics = args.output_dir / "rows.parquet", args.output_dir / "steps.jsonl"
    write_rows(rows, contents, job.prompt_tokens, AutoTokenizer.from_pretrained(args.model))
    wait_for_turn(job)
    paths = verl_paths(args.model, rows, Path(verl_reward.__file__), args.output_dir, args.steps)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *args.overrides, *paths]
    subprocess.run(command, check=True, env={**os.environ, **ENVIRONMENT, "VERL_FILE_LOGGER_PATH": str(metrics)})
    logged = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    result = result_of(logged, sum(map(len, job.completion_tokens)))
    Path(job.folder, "rank0.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
