"""Simulate many data-parallel ranks: the real planner and real messages, with measured speeds.

    python -m benchmarks.simulate_scaling [--output_file FILE]

Balance, micro batches and bytes are exact. Seconds of planning and of packing messages are measured on this machine.
Seconds of a train phase follow from FLOPs, and seconds of gradients from bytes, with the speeds of H200s. The model is
Qwen3-8B.
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.harness.lengths import Lengths
from benchmarks.harness.markdown import lines_of
from swift_megatron_grpo.grading.metrics import outcome_metrics
from swift_megatron_grpo.grading.results import add_advantages, total_rewards
from swift_megatron_grpo.grading.scores import Scores
from swift_megatron_grpo.loop.bodies import Bodies
from swift_megatron_grpo.loop.finished import Scored
from swift_megatron_grpo.loop.samples import samples_of
from swift_megatron_grpo.packing.arrays import pick
from swift_megatron_grpo.packing.collate import count
from swift_megatron_grpo.packing.completions import spans
from swift_megatron_grpo.packing.flops import FlopsModel
from swift_megatron_grpo.packing.plan import Alignment, StepPlan, plan_by_tokens
from swift_megatron_grpo.settings.config import GradingConfig
from swift_megatron_grpo.types import Prompt, Rollout

RANKS = (8, 64, 512, 4096)
BUDGET, PROMPT = 16384, 256
LENGTHS = "lognormal:700:0.9:4096"
PER_RANK, GROUP = 64, 8  # completions of a rank and of a prompt
RUNS = 7  # of which the fastest counts: the machine may have other work
MEASURED = (
    "planning_seconds",
    "outlines_seconds",
    "grading_moves_seconds",
    "rewards_seconds",
    "samples_seconds",
    "bodies_seconds",
)


GRADING = GradingConfig(
    num_generations=GROUP, reward_names=("accuracy",), reward_weights=(1.0,), scale_rewards="group", bad_reward="stop"
)
VOCABULARY = 151936
COST = FlopsModel.of_transformer(
    num_layers=36, hidden_size=4096, ffn_hidden_size=12288, num_attention_heads=32, num_query_groups=8,
    kv_channels=128, vocab_size=VOCABULARY,
)  # fmt: skip
# Without norms. A layer has queries and their output projection, keys and values, and three matrices of its MLP; the
# output layer is not the embedding.
WEIGHTS = 36 * 4096 * (128 * (2 * 32 + 2 * 8) + 3 * 12288) + 2 * VOCABULARY * 4096
MESSAGE_SECONDS = 30e-6  # of gloo; not measured
GATHERS, AGREEMENTS = 2, 2  # of outlines and scores, in rounds of two messages; of the digest, in rounds of one
SPEEDS = {  # of one rank
    "flops": 0.5 * 989e12,  # a train phase at the MFU of dense models on one H200 (docs/performance.md)
    "nvlink": 190e9,  # bytes a second of a reduce-scatter on four H200s: 1.7B fp32 gradients in 0.027 s
    "gloo": 2.5e9,  # bytes a second over TCP, as a share of what a machine of 8 ranks has; not measured
    "network": 50e9,  # bytes a second: one 400 Gbit/s adapter per GPU; not measured
}


def simulate(ranks: int) -> dict[str, Any]:
    """Return what one step costs each rank, with `PER_RANK` completions on each."""
    completions = Lengths(LENGTHS).draw(ranks * PER_RANK, random.Random(0))
    lengths = [PROMPT + tokens for tokens in completions]
    tokens, trained = np.array(lengths), np.array(completions)
    began = time.process_time()
    plan = plan_by_tokens(tokens, ranks, BUDGET, COST, Alignment(1, 1), completion_lengths=trained)
    seconds = time.process_time() - began
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
        **measure_exchange(completions, plan),
    }


class OneOfMany:
    """The messages of the first of many ranks, whose network takes no time: those that arrive are made before."""

    rank = 0

    def __init__(self) -> None:
        self.arriving: dict[int, bytes] = {}
        self.sent: dict[int, int] = {}

    def max(self, value: int) -> int:
        return value

    def exchange(self, outgoing: Mapping[int, Any], senders: Sequence[int]) -> dict[int, Any]:
        self.sent = {rank: len(pickle.dumps(value)) for rank, value in outgoing.items()}
        return {rank: pickle.loads(self.arriving[rank]) for rank in senders}


def rollout_of(index: int, tokens: int) -> Rollout:
    rng = random.Random(index)
    ids = [rng.randrange(VOCABULARY) for _ in range(PROMPT + tokens)]
    logprobs = [rng.random() for _ in range(tokens)]
    return Rollout(Prompt("0" * 32, {}), ids[:PROMPT], ids[PROMPT:], logprobs, "x" * 4 * tokens, "stop", 0)


def measure_exchange(completions: list[int], plan: StepPlan) -> dict[str, Any]:
    """Measure what the exchange of completions costs one rank, with the loop's code, and its messages.

    Text, log-probs and prompts are in the messages. Where the network is counted, a message takes 30 us and the bytes
    of a rank go at 2.5 GB/s, which is assumed.
    """
    ranks = len(completions) // PER_RANK
    coordinator = OneOfMany()
    bodies = Bodies(cast(Any, coordinator))
    own = {index: rollout_of(index, completions[index]) for index in range(PER_RANK)}
    everything = len(pickle.dumps(own)) * sum(completions) / sum(completions[:PER_RANK])
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        seconds[name] = time.process_time() - began

    message = pickle.dumps(bodies.outlines(own))
    others = []
    for rank in range(1, ranks):
        empty = {
            index: Rollout(Prompt("0" * 32, {}), [0] * PROMPT, [0] * completions[index], [], "", "stop", 0)
            for index in range(rank * PER_RANK, (rank + 1) * PER_RANK)
        }
        others.append(pickle.dumps(Bodies(cast(Any, OneOfMany())).outlines(empty)))
    rewards = random.Random(1)
    scores = [
        pickle.dumps(Scores.of([[float(rewards.random() < 0.5)] for _ in range(PER_RANK)], 1).to_bytes())
        for _ in range(ranks)
    ]
    prompts = [Prompt(f"{number:032}", {}) for number in range(len(completions) // GROUP)]
    gc.collect()
    gc.freeze()
    with timed("outlines"):
        finished = bodies.read([pickle.loads(data) for data in (message, *others)], prompts, GROUP)
        np.unique(spans(finished.rollouts).versions)
    with timed("grading_moves"):
        graders = finished.graders(GROUP, ranks)
        bodies.move_to(finished.rollouts, graders)
        pick(finished.rollouts, (graders == coordinator.rank).nonzero()[0])
    with timed("rewards"):
        gathered = Scores.from_bytes([pickle.loads(data) for data in scores], len(finished))
        scored = Scored(finished.indices, finished.rollouts, gathered).between(0, len(finished))
        graded = add_advantages(total_rewards(scored.rollouts, scored.scores, GRADING), GRADING)
        outcome_metrics(graded.outcomes, GRADING.reward_names, GROUP)
    with timed("samples"):
        samples = samples_of(graded, GROUP, overlong_filter=False, image_reader=None)
        count(samples)
    needed: dict[int, list[Rollout]] = {}
    for index in plan.samples_of_ranks()[0]:
        if (sender := index // PER_RANK) != 0:
            needed.setdefault(sender, []).append(rollout_of(index, completions[index]))
    coordinator.arriving = {sender: pickle.dumps(moved) for sender, moved in needed.items()}
    with timed("bodies"):
        mine = bodies.fetch(range(ranks), samples, plan)
        for index in plan.samples_of_ranks()[0]:
            mine[index]
    gc.unfreeze()
    received = sum(map(len, coordinator.arriving.values()))
    peers = len(coordinator.arriving) + len(coordinator.sent)
    outline_bytes = len(message) + sum(map(len, others))
    return {
        "everything_bytes": everything,
        "outline_bytes": outline_bytes,
        "body_bytes": received,
        "peers": peers,
        **{f"{name}_seconds": round(value, 3) for name, value in seconds.items()},
        "network_seconds": round(
            MESSAGE_SECONDS * ((2 * GATHERS + AGREEMENTS) * (ranks - 1).bit_length() + 2 * peers)
            + (outline_bytes + sum(map(len, scores)) + received + sum(coordinator.sent.values())) / SPEEDS["gloo"],
            3,
        ),
    }


def fastest(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a run with the least seconds that any of them took for each part."""
    return runs[0] | {name: min(run[name] for run in runs) for name in MEASURED}


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
        "all completions": lambda r: f"{r['everything_bytes'] / 1e6:,.0f} MB",
        "outlines that a rank receives": lambda r: f"{r['outline_bytes'] / 1e6:,.2f} MB",
        "completions that it receives": lambda r: f"{r['body_bytes'] / 1e6:,.2f} MB",
        "reading the outlines": lambda r: f"{r['outlines_seconds']:.2f} s",
        "totals, advantages and metrics": lambda r: f"{r['rewards_seconds']:.2f} s",
        "samples of them": lambda r: f"{r['samples_seconds']:.2f} s",
        "moving the completions": lambda r: f"{r['grading_moves_seconds'] + r['bodies_seconds']:.2f} s",
        "messages, with an assumed network": lambda r: f"{r['network_seconds']:.2f} s",
        "these and planning": lambda r: f"{sum(r[name] for name in MEASURED) + r['network_seconds']:.2f} s",
    }
    heads = ["ranks", *(str(row["ranks"]) for row in rows)]
    return lines_of([heads, *([name, *map(show, rows)] for name, show in lines.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_file", type=Path, help="also write the numbers to this file, as JSON")
    options = parser.parse_args()
    rows = [fastest([simulate(ranks) for _ in range(RUNS)]) for ranks in RANKS]
    if options.output_file is not None:
        sizes = {"budget": BUDGET, "prompt": PROMPT, "lengths": LENGTHS, "per_rank": PER_RANK}
        result = {"workload": {"model": "Qwen3-8B", **sizes}, "speeds": SPEEDS, "rows": rows}
        options.output_file.write_text(json.dumps(result, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
