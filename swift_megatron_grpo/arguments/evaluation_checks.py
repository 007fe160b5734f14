"""Checks of the flags of evaluation, on plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swift_megatron_grpo.arguments.advice import typed_value

# flags that have no effect without a validation dataset, with the values at which they say nothing
ONLY_WITH_DATASET: Mapping[str, Any] = {
    "eval_before_train": False,
    "eval_names": None,
    "eval_temperature": None,
    "eval_top_p": None,
    "eval_max_completion_length": None,
    "eval_correct_reward": None,
    "eval_correct_from": 1.0,
}
_LEAST_TEMPERATURE = 0.01  # vLLM samples at this temperature below it


@dataclass(frozen=True, slots=True)
class EvaluationFlags:
    """Values as typed; None for a flag that was not."""

    given: Mapping[str, Any]  # of ONLY_WITH_DATASET
    val_dataset: Sequence[str]
    split_dataset_ratio: float
    eval_iters: int
    num_generations_eval: int | None
    rollout_only: bool


def check_evaluation(flags: EvaluationFlags) -> None:
    """Check the flags of evaluation against each other."""
    for flag, silent in ONLY_WITH_DATASET.items():
        if flags.given[flag] != silent:
            _check_dataset(flag, flags)
    if flags.given["eval_names"] is not None and not flags.val_dataset:
        raise ValueError(
            "--eval_names names the datasets of --val_dataset, and --split_dataset_ratio has one without a name; use "
            "--val_dataset, or leave --eval_names out"
        )
    temperature, generations = flags.given["eval_temperature"], flags.num_generations_eval
    if temperature is not None:
        if not (temperature == 0 or _LEAST_TEMPERATURE <= temperature < math.inf):
            raise ValueError(
                f"--eval_temperature {temperature:g} must be 0, which is greedy, or at least {_LEAST_TEMPERATURE}; use "
                "--eval_temperature 0.6"
            )
        if temperature == 0 and generations is not None and generations > 1:
            raise ValueError(
                f"--eval_temperature 0 is greedy, so all --num_generations_eval {generations} completions of a prompt "
                "would be the same; use --num_generations_eval 1, or --eval_temperature 0.6"
            )
    correct_from = flags.given["eval_correct_from"]
    if not math.isfinite(correct_from):
        raise ValueError(f"--eval_correct_from {correct_from} is not a finite number; use --eval_correct_from 1.0")


def _check_dataset(flag: str, flags: EvaluationFlags) -> None:
    """Refuse a flag that would have no effect, because the run evaluates nothing."""
    given = f"--{flag} {typed_value(flags.given[flag])}"
    if flags.rollout_only:
        raise ValueError(f"{given} has no effect with --rollout_only true, which does not evaluate; leave one out")
    if flags.eval_iters == 0:
        raise ValueError(f"{given} has no effect with --eval_iters 0, which does not evaluate; use --eval_iters -1")
    if not flags.val_dataset and flags.split_dataset_ratio == 0:
        raise ValueError(
            f"{given} has no effect without a dataset to evaluate on; use --val_dataset with a file or hub id, or "
            "--split_dataset_ratio 0.01"
        )


def rounds_of(sizes: Sequence[int], most: int, at_once: int) -> int:
    """Return the number of rounds of an evaluation of datasets of these sizes. `most`: of each; 0: all prompts."""
    return sum(-(-(min(size, most) if most else size) // at_once) for size in sizes)


def start_up_notes(
    before_training: bool, every: int | None, generations: int, temperature: float, names: Sequence[str]
) -> list[str]:
    """Return a line that says when and how this run evaluates."""
    when = ["before training"] if before_training else []
    when += [f"every {every} steps"] if every else []
    how = "greedy" if temperature == 0 else f"at temperature {temperature:g}"
    of = f" of {', '.join(names)}" if names else ""
    completions = "1 completion" if generations == 1 else f"{generations} completions"
    return [f"evaluation{of}: {', '.join([*when, 'after the last step'])}; {completions} of each prompt, {how}"]
