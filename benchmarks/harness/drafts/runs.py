"""The tasks and flags of the runs of benchmarks/drafts.py, and what a run has logged and dumped, step by step."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.learning.settings import CACHE, CACHE_BYTES
from benchmarks.harness.learning.steps import read_steps, rows_of_steps
from benchmarks.harness.recipes.runs import read_rows
from swift_megatron_grpo.cli.simulate_drafts.command import replayed, total
from swift_megatron_grpo.cli.simulate_drafts.dump import Dumped, read_dump

SUMS = '{"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}'
MODES = ("off", "history", "again")  # without drafts, with them, and the first one once more
PROMPTS = 400  # 8 of a step: 200 steps see each of them four times
REPLAYED = 20  # rollouts at the beginning and at the end whose drafts are counted
DEPTH = 4  # drafts of a request, the default of --speculative_tokens
NEVER = "1000000"
Run = dict[str, Any]


@dataclass(frozen=True)
class Task:
    name: str  # in reasoning_gym
    settings: str
    instruction: str  # follows the question
    tokens: int  # of a completion, at most
    says: str  # on the page


TASKS = {
    "sums": Task("chain_sum", SUMS, "Answer with the number only.", 64, "sums, the number alone"),
    "steps": Task("chain_sum", SUMS, "Think step by step. End with the number.", 256, "sums, step by step"),
    "letters": Task("letter_counting", '{"min_words": 3, "max_words": 6}', "Repeat the text. End with the number.", 64,
                    "letters of a text, after it"),
}  # fmt: skip


def flags_of(task: Task, mode: str, dtype: str, on_gpu: bool, steps: int, completions: int, dump: Path) -> list[str]:
    """Return the flags that override those of the recipe `full`. Few requests run, as drafts need it."""
    flags = ["--seed_completions", "true", "--rollout_dump", str(dump), "--train_iters", str(steps),
             "--global_batch_size", str(completions), "--max_completion_length", str(task.tokens),
             "--eval_before_train", "false", "--eval_steps", NEVER, "--save_steps", NEVER,
             "--torch_dtype", dtype, "--speculative_rollouts", "history" if mode == "history" else "off"]  # fmt: skip
    if on_gpu:  # which several runs share
        kwargs = json.dumps({CACHE: CACHE_BYTES})
        flags += ["--vllm_gpu_memory_utilization", "0.1", "--vllm_engine_kwargs", kwargs]
    if on_gpu and dtype == "float32":  # no other kernel computes in fp32; its memory grows with the square of the pack
        flags += ["--fp16", "false", "--attention_backend", "unfused", "--max_tokens_per_micro_batch", "2048",
                  "--vllm_enforce_eager", "true"]  # fmt: skip
    return flags


def read_run(output: Path, dump: Path) -> Run:
    """Return the series of a run, one value for each step that was logged."""
    steps = rows_of_steps(read_rows(output / "logging.jsonl"))
    series: Run = read_steps("ours", output, int(NEVER))
    dumped = read_dump(dump) if dump.is_dir() else {}
    rollouts = [dumped[number] for number in sorted(dumped)][: len(steps)]

    def logged(name: str) -> list[float]:
        return [round(float(row[name]), 6) for row in steps if name in row]

    drafts = ("verified", "accepted", "steps_saved")
    return {
        **series,
        "grad_norm": [row["grad_norm"] for row in steps],
        "generation": logged("time/generation"),
        **{name: logged(f"drafts/{name}") for name in drafts},
        "mean_logprob": [round(statistics.fmean(value for draw in draws for value in draw.logprobs), 4)
                         for draws in rollouts],
        "digests": [digest_of(draws) for draws in rollouts],
        "replayed": accepted_in(dumped) if rollouts else {},
    }  # fmt: skip


def digest_of(draws: Sequence[Dumped]) -> str:
    """Return the digest of all tokens of a rollout, of prompts and completions, in order."""
    tokens = [[list(one.prompt), list(one.tokens)] for draw in draws for one in draw.completions]
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def accepted_in(dumped: Mapping[int, Sequence[Dumped]]) -> dict[str, float]:
    """Return the tokens that a step adds to a request beyond one, with DEPTH drafts, in the first and last rollouts."""
    numbers = sorted(dumped)
    parts = {"first": numbers[:REPLAYED], "last": numbers[-REPLAYED:]}
    tallies = {name: total(replayed(dumped, part, DEPTH, None)) for name, part in parts.items()}
    return {name: round(tally.tokens / tally.requests - 1, 4) for name, tally in tallies.items()}


def first_difference(run: Run, other: Run, series: str = "digests") -> int | None:
    """Return the first step at which two runs differ, counted from 1; None: their common steps are equal."""
    pairs = zip(run[series], other[series], strict=False)
    return next((step for step, (one, two) in enumerate(pairs, 1) if one != two), None)


def name_of(task: str, dtype: str, mode: str) -> str:
    return f"{task}-{dtype}-{mode}"


def late_acceptance(out: Path) -> float | None:
    """Return what SmolLM2 accepts late in training, on average over tasks; None: no run with drafts was measured."""
    files = [out / f"drafts-{name_of(task, 'bfloat16', 'history')}.json" for task in TASKS]
    runs = [json.loads(file.read_text()) for file in files if file.is_file()]
    found = [run["replayed"]["last"] for run in runs if run["exit_code"] == 0]
    return statistics.fmean(found) if found else None
