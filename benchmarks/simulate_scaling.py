"""Simulate many data-parallel ranks: the real planner and real messages, with measured speeds.

    python -m benchmarks.simulate_scaling [--output_file FILE]

Balance, micro batches and bytes are exact. Seconds of planning and of packing messages are measured on this machine.
Seconds of a train phase follow from FLOPs, and seconds of gradients from bytes, with the speeds of H200s. The model is
Qwen3-8B.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.lengths import Lengths
from benchmarks.harness.markdown import lines_of
from swift_megatron_grpo.packing.flops import FlopsModel
from swift_megatron_grpo.packing.plan import Alignment, plan_by_tokens

RANKS = (8, 64, 512)
BUDGET, PROMPT = 16384, 256
LENGTHS = "lognormal:700:0.9:4096"
PER_RANK = 64  # completions


VOCABULARY = 151936
COST = FlopsModel.of_transformer(
    num_layers=36, hidden_size=4096, ffn_hidden_size=12288, num_attention_heads=32, num_query_groups=8,
    kv_channels=128, vocab_size=VOCABULARY,
)  # fmt: skip
# Without norms. A layer has queries and their output projection, keys and values, and three matrices of its MLP; the
# output layer is not the embedding.
WEIGHTS = 36 * 4096 * (128 * (2 * 32 + 2 * 8) + 3 * 12288) + 2 * VOCABULARY * 4096
SPEEDS = {  # of one rank
    "flops": 0.5 * 989e12,  # a train phase at the MFU of dense models on one H200 (docs/performance.md)
    "nvlink": 190e9,  # bytes a second of a reduce-scatter on four H200s: 1.7B fp32 gradients in 0.027 s
    "network": 50e9,  # bytes a second: one 400 Gbit/s adapter per GPU; not measured
}


def simulate(ranks: int) -> dict[str, Any]:
    """Return what one step costs each rank, with `PER_RANK` completions on each."""
    completions = Lengths(LENGTHS).draw(ranks * PER_RANK, random.Random(0))
    lengths = [PROMPT + tokens for tokens in completions]
    began = time.perf_counter()
    plan = plan_by_tokens(lengths, ranks, BUDGET, COST, Alignment(1, 1), completion_lengths=completions)
    seconds = time.perf_counter() - began
    work = [
        sum(COST.of_sequence(lengths[i], completions[i]) for i in samples) * 3 for samples in plan.samples_of_ranks()
    ]
    exchanged = (2 * WEIGHTS + 4 * WEIGHTS) * (ranks - 1) / ranks  # gathered in bf16, reduced in fp32
    link = SPEEDS["nvlink" if ranks <= 8 else "network"]
    return {
        "ranks": ranks,
        "completions": len(lengths),
        "planning_seconds": round(seconds, 3),
        "micro_batches": plan.num_micro_batches,
        "balance": sum(work) / ranks / max(work),
        "fill": sum(lengths) / (ranks * plan.num_micro_batches * BUDGET),
        "train_seconds": round(max(work) / SPEEDS["flops"], 2),
        "gradient_bytes": exchanged,
        "gradient_seconds": round(exchanged / link, 2),
        **measure_rollouts(completions),
    }


def measure_rollouts(completions: list[int]) -> dict[str, Any]:
    """Return the bytes of all completions, which every rank receives, and the seconds that unpacking them takes."""
    from swift_megatron_grpo.types import Prompt, Rollout

    rng = random.Random(1)

    def rollout(tokens: int) -> Rollout:
        prompt = Prompt("0" * 32, {"messages": [{"role": "user", "content": "x" * 4 * PROMPT}]})
        ids = [rng.randrange(VOCABULARY) for _ in range(PROMPT + tokens)]
        logprobs = [rng.random() for _ in range(tokens)]
        return Rollout(prompt, ids[:PROMPT], ids[PROMPT:], logprobs, "x" * 4 * tokens, "stop", 0)

    part = completions[:512]
    message = pickle.dumps([rollout(tokens) for tokens in part])
    began = time.perf_counter()
    pickle.loads(message)
    seconds, factor = time.perf_counter() - began, sum(completions) / sum(part)
    return {"rollout_bytes": len(message) * factor, "unpack_seconds": round(seconds * factor, 2)}


def table(rows: list[dict[str, Any]]) -> str:
    lines = {
        "completions of a step": lambda r: f"{r['completions']:,}",
        "planning": lambda r: f"{r['planning_seconds']:.2f} s",
        "micro batches of a rank": lambda r: str(r["micro_batches"]),
        "tokens in them, of the budget": lambda r: f"{r['fill']:.1%}",
        "mean FLOPs of a rank, of the largest": lambda r: f"{r['balance']:.2%}",
        "forward and backward": lambda r: f"{r['train_seconds']:.1f} s",
        "gradients and weights that a rank sends": lambda r: f"{r['gradient_bytes'] / 1e9:.0f} GB",
        "the same, not overlapped": lambda r: f"{r['gradient_seconds']:.2f} s",
        "completions that a rank receives": lambda r: f"{r['rollout_bytes'] / 1e6:,.0f} MB",
        "unpacking them": lambda r: f"{r['unpack_seconds']:.2f} s",
    }
    heads = ["ranks", *(str(row["ranks"]) for row in rows)]
    return lines_of([heads, *([name, *map(show, rows)] for name, show in lines.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_file", type=Path, help="also write the numbers to this file, as JSON")
    options = parser.parse_args()
    rows = [simulate(ranks) for ranks in RANKS]
    if options.output_file is not None:
        sizes = {"budget": BUDGET, "prompt": PROMPT, "lengths": LENGTHS, "per_rank": PER_RANK}
        result = {"workload": {"model": "Qwen3-8B", **sizes}, "speeds": SPEEDS, "rows": rows}
        options.output_file.write_text(json.dumps(result, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
