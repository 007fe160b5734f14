"""Flags of evaluation: what is refused, with the value that works."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from swift_megatron_grpo.arguments.evaluation_checks import (
    ONLY_WITH_DATASET,
    EvaluationFlags,
    check_evaluation,
    rounds_of,
    start_up_notes,
)


def flags(given: dict[str, Any], **others: Any) -> EvaluationFlags:
    values = {"val_dataset": ["a.jsonl"], "split_dataset_ratio": 0.0, "eval_iters": -1, "num_generations_eval": None,
              "rollout_only": False}  # fmt: skip
    return EvaluationFlags({**ONLY_WITH_DATASET, **given}, **(values | others))


@pytest.mark.parametrize(
    ("given", "others", "message"),
    [
        ({"eval_before_train": True}, {"val_dataset": []}, "--eval_before_train true .* use --val_dataset with a file"),
        ({"eval_top_p": 0.9}, {"eval_iters": 0}, "--eval_top_p 0.9 .* use --eval_iters -1"),
        ({"eval_before_train": True}, {"rollout_only": True}, "--rollout_only true, which does not evaluate"),
        (
            {"eval_names": ["a"]},
            {"val_dataset": [], "split_dataset_ratio": 0.1},
            "--eval_names names .* use --val_dataset",
        ),
        ({"eval_temperature": 0.001}, {}, "--eval_temperature 0.001 must be 0, .* use --eval_temperature 0.6"),
        ({"eval_temperature": math.nan}, {}, "--eval_temperature nan"),
        ({"eval_temperature": 0.0}, {"num_generations_eval": 4}, "use --num_generations_eval 1, or --eval_temperature"),
        ({"eval_correct_from": math.inf}, {}, "--eval_correct_from inf .* use --eval_correct_from 1.0"),
    ],
)
def test_flags_without_effect_or_sense_are_refused(given: Any, others: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_evaluation(flags(given, **others))


def test_every_flag_without_a_dataset_is_refused() -> None:
    given: dict[str, Any] = {"eval_before_train": True, "eval_names": ["a"], "eval_temperature": 1.0, "eval_top_p": 1.0,
             "eval_max_completion_length": 8, "eval_correct_reward": "x", "eval_correct_from": 0.5}  # fmt: skip
    assert given.keys() == ONLY_WITH_DATASET.keys()
    for flag, value in given.items():
        with pytest.raises(ValueError, match=re.escape(f"--{flag} ")):
            check_evaluation(flags({flag: value}, val_dataset=[]))
    check_evaluation(flags(given))
    check_evaluation(flags({}, val_dataset=[]))
    check_evaluation(flags({"eval_before_train": True}, val_dataset=[], split_dataset_ratio=0.1))


def test_small_datasets_and_last_prompts_have_rounds_of_their_own() -> None:
    assert rounds_of([1], most=0, at_once=8) == 1
    assert rounds_of([9, 8, 3], most=0, at_once=8) == 2 + 1 + 1
    assert rounds_of([9, 8, 3], most=4, at_once=2) == 2 + 2 + 2


def test_the_start_up_log_says_when_and_how_a_run_evaluates() -> None:
    [line] = start_up_notes(True, 10, 4, 0.6, ["gsm8k", "math"])
    assert line == (
        "evaluation of gsm8k, math: before training, every 10 steps, after the last step; 4 completions of each "
        "prompt, at temperature 0.6"
    )
    [line] = start_up_notes(False, None, 1, 0, [])
    assert line == "evaluation: after the last step; 1 completion of each prompt, greedy"
