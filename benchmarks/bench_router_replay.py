"""Measure what router replay is worth: the difference between trainer and vLLM without it, and with each mode.

    python -m benchmarks.bench_router_replay --json benchmarks/h200/parts/router-replay.json
    python -m benchmarks.bench_router_replay --json FILE --shape toy-qwen3-moe --completions 8 --tokens 16     on a CPU

Each mode is a run of `megatron rlhf` with adapters and with vLLM in the training process, in which two steps train each
rollout. The file has the metrics that the steps of each run logged.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench import PACKAGES, machine, revision
from benchmarks.harness.checkpoints import made_checkpoint
from benchmarks.harness.paths import REPOSITORY, absolute
from benchmarks.harness.processes import devices_locked, make_entry_point, program
from benchmarks.harness.shapes import SHAPES
from benchmarks.harness.workload import TEMPLATE_TOKENS_FILE, write_dataset

PROMPT_TOKENS, GROUP = 64, 8
METRICS = ("loss", "grad_norm", "rollout/k3_kl", "rollout/router_agreement", "train_speed(s/it)")
REWARD = """
import zlib
from swift.rewards import ORM, orms

class HashReward(ORM):
    def __call__(self, completions, **columns):
        return [zlib.crc32(text.encode()) / 2**32 for text in completions]

orms["hash"] = HashReward
"""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", type=absolute, required=True, help="file for the results")
    add("--shape", choices=[name for name, shape in SHAPES.items() if shape.experts], default="4.5b-qwen3-moe")
    add("--modes", nargs="+", default=["disabled", "R2", "R3"], help="values of --router_replay_mode")
    add("--completions", type=int, default=64, help="completions per step")
    add("--tokens", type=int, default=256, help="tokens of a completion, at most")
    add("--steps", type=int, default=4, help="steps of a run")
    add("--timeout", type=float, default=240, help="seconds for one run")
    add(
        "--work",
        type=absolute,
        default=REPOSITORY / "runs" / "router_replay",
        help="folder for model, logs and outputs",
    )
    add("--flags", nargs="*", default=[], help="further flags of `megatron rlhf`")
    return parser.parse_args()


def make_inputs(work: Path, name: str, rows: int) -> tuple[Path, Path, Path]:
    """Return the model, the dataset and the reward's plugin."""
    model, dataset, reward = made_checkpoint(work, name), work / "prompts.jsonl", work / "hash_reward.py"
    write_dataset(dataset, [PROMPT_TOKENS] * rows, int((model / TEMPLATE_TOKENS_FILE).read_text()))
    reward.write_text(REWARD)
    return model, dataset, reward


def train(args: argparse.Namespace, mode: str) -> list[dict[str, Any]]:
    """Return the metrics of the run's steps, or none if it failed."""
    model, dataset, reward = make_inputs(args.work, args.shape, 2 * args.completions // GROUP)
    gpu = torch.cuda.is_available()
    lengths = PROMPT_TOKENS + args.tokens
    output = args.work / mode
    command = [*program(), "rlhf", "--rlhf_type", "grpo", "--model", str(model), "--model_type", "qwen3_moe",
               "--template", "qwen3", "--dataset", str(dataset), "--dataset_shuffle", "false", "--check_model", "false",
               "--load_from_cache_file", "false", "--add_version", "false", "--output_dir", str(output),
               "--external_plugins", str(reward), "--reward_funcs", "hash", "--num_generations", str(GROUP),
               "--global_batch_size", str(args.completions), "--generation_batch_size", str(2 * args.completions),
               "--micro_batch_size", "8", "--max_length", str(PROMPT_TOKENS),
               "--max_completion_length", str(args.tokens), "--vllm_mode", "colocate", "--vllm_max_model_len",
               str(lengths), "--vllm_enforce_eager", "true", "--vllm_gpu_memory_utilization", "0.3", "--sleep_level",
               "1" if gpu else "0", "--torch_dtype", "bfloat16", "--attention_backend", "fused" if gpu else "flash",
               "--recompute_granularity", "none", "--moe_grouped_gemm", "true", "--moe_permute_fusion", "true",
               "--tuner_type", "lora", "--lora_rank", "16", "--lora_alpha", "32", "--target_modules", "all-linear",
               "--lr", "1e-4", "--beta", "0", "--temperature", "1.0", "--logging_steps", "1", "--save_steps", "1000000",
               "--train_iters", str(args.steps), "--router_replay_mode", mode, *args.flags]  # fmt: skip
    if mode == "disabled":
        command += ["--router_agreement_samples", "16"]
    paths = [str(REPOSITORY), str(args.work), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "NPROC_PER_NODE": "1"}
    output.mkdir(parents=True, exist_ok=True)
    with (output / "log.txt").open("wb") as log, devices_locked():
        done = subprocess.run(["timeout", "-k", "60", str(args.timeout), *command], stdout=log, stderr=log,
                              cwd=output, env=environment)  # fmt: skip
    if done.returncode:
        print(f"{mode}: exit code {done.returncode}; the log is {output / 'log.txt'}", flush=True)
        return []
    rows = [json.loads(line) for path in output.rglob("logging.jsonl") for line in path.read_text().splitlines()]
    return [{name: row[name] for name in METRICS if name in row} for row in rows if "grad_norm" in row]


def main() -> int:
    args = parse()
    args.work.mkdir(parents=True, exist_ok=True)
    make_entry_point(args.work)
    device, versions = machine(revision(), PACKAGES)
    runs: dict[str, list[dict[str, Any]]] = {}
    for mode in args.modes:
        runs[mode] = train(args, mode)
        print(mode, json.dumps(runs[mode]), flush=True)
        report = {"device": device, "versions": versions, "shape": args.shape, "completions": args.completions,
                  "tokens": args.tokens, "runs": runs}  # fmt: skip
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(runs.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
