"""Flags of sampling and evaluation: what is refused, with the value that works."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from swift_megatron_grpo.arguments.derived import shape_of
from swift_megatron_grpo.generation.requests import request_config
from swift_megatron_grpo.settings.layout import unread_window
from swift_megatron_grpo.settings.sampling import Evaluation, Sampling, rounds_of
from tests.unit.settings.flags import faults, of

DATASET: dict[str, Any] = {"val_dataset": ["a.jsonl"], "eval_iters": -1}


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ({"eval_before_train": True, "val_dataset": []}, "--eval_before_train true .* use --val_dataset with a file"),
        ({"eval_top_p": 0.9, "eval_iters": 0}, "--eval_top_p 0.9 .* use --eval_iters -1"),
        ({"eval_before_train": True, "rollout_only": True}, "--rollout_only true, which does not evaluate"),
        ({"eval_names": ["a"], "val_dataset": [], "split_dataset_ratio": 0.1}, "--eval_names names .* use --val_data"),
        ({"eval_temperature": 0.001}, "--eval_temperature 0.001 must be 0, .* use --eval_temperature 0.6"),
        ({"eval_temperature": math.nan}, "--eval_temperature nan"),
        ({"eval_temperature": 0.0, "num_generations_eval": 4}, "use --num_generations_eval 1, or --eval_temperature"),
        ({"num_generations_eval": 0}, "--num_generations_eval 0 must be at least 1; use --num_generations_eval 8"),
    ],
)
def test_flags_without_effect_or_sense_are_refused(typed: dict[str, Any], message: str) -> None:
    assert re.search(message, faults(Evaluation, **DATASET | typed))


def test_every_flag_without_a_dataset_is_refused() -> None:
    given: dict[str, Any] = {"eval_before_train": True, "eval_names": ["a"], "eval_temperature": 1.0, "eval_top_p": 1.0,
             "eval_max_completion_length": 8, "eval_correct_reward": "x", "eval_correct_from": 0.5}  # fmt: skip
    assert {f"--{flag}" for flag in given} == {*of(Evaluation, **given).changed("eval_")}
    for flag, value in given.items():
        assert f"--{flag} " in faults(Evaluation, **{flag: value})
    assert faults(Evaluation, **DATASET, **given) == faults(Evaluation) == ""
    assert faults(Evaluation, eval_before_train=True, eval_iters=-1, split_dataset_ratio=0.1) == ""


def test_small_datasets_and_last_prompts_have_rounds_of_their_own() -> None:
    assert rounds_of([1], most=0, at_once=8) == 1
    assert rounds_of([9, 8, 3], most=0, at_once=8) == 2 + 1 + 1
    assert rounds_of([9, 8, 3], most=4, at_once=2) == 2 + 2 + 2


def test_the_start_up_log_says_when_and_how_a_run_evaluates() -> None:
    typed: dict[str, Any] = {"eval_before_train": True, "eval_steps": 10, "num_generations_eval": 4}
    assert of(Evaluation, **DATASET, **typed, eval_temperature=0.6).notes(["gsm8k", "math"]) == [
        "evaluation of gsm8k, math: before training, every 10 steps, after the last step; 4 completions of each "
        "prompt, at temperature 0.6"
    ]
    [line] = of(Evaluation, **DATASET, eval_steps=None, eval_temperature=0.0).notes([])
    assert line == "evaluation: after the last step; 1 completion of each prompt, greedy"


def test_vllm_needs_room_for_a_prompt_and_a_completion() -> None:
    assert "use --max_completion_length 512" in faults(Sampling, max_completion_length=0)
    assert "--vllm_max_model_len 1 has no room" in faults(Sampling, vllm_max_model_len=1)
    assert faults(Sampling, vllm_max_model_len=1, vllm_mode="server") == faults(Sampling, vllm_max_model_len=2) == ""


def test_completions_that_are_cut_are_noted() -> None:
    typed: dict[str, Any] = {"max_length": 100, "max_completion_length": 50}
    assert of(Sampling, **typed, vllm_max_model_len=150).notes(50) == of(Sampling, **typed).notes(50) == []
    [note] = of(Sampling, **typed, vllm_max_model_len=149).notes(50)
    assert note.startswith("--vllm_max_model_len 149 is less than --max_length 100 and --max_completion_length 50 tog")
    [note] = of(Sampling, **typed, vllm_max_model_len=149).notes(60)
    assert "--eval_max_completion_length 60" in note and note.endswith("--vllm_max_model_len 160 has room for all")


WINDOW = {"sliding_window": 512, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"model_type": "llama"}, 512),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2}, 512),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 4}, None),  # no layer has it
        ({"model_type": "qwen2_moe", "use_sliding_window": True, "max_window_layers": 4}, 512),  # every second layer
        ({"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["sliding_attention"] * 4}, 512),
        ({"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["full_attention"] * 4}, None),
        ({"model_type": "qwen2", "use_sliding_window": False}, None),
        ({"model_type": "qwen2"}, None),
        ({"model_type": "llama", "sliding_window": None}, None),
        ({"model_type": "gpt_oss"}, None),  # mcore-bridge reads it
    ],
)
def test_an_active_window_that_the_trainer_lacks_is_found(config: dict[str, Any], window: int | None) -> None:
    assert unread_window(WINDOW | config) == window


def test_sequences_longer_than_an_unread_window_are_refused() -> None:
    shape = shape_of(WINDOW | {"model_type": "llama"}, "m")
    local: dict[str, Any] = {"vllm_mode": "colocate", "max_completion_length": 256}
    refused = r"--model m: .* sliding window of 512 tokens, .* full attention; use "
    assert re.search(f"{refused}--vllm_max_model_len 512, or", faults(Sampling, shape=shape, **local, max_length=257))
    assert re.search(refused, faults(Sampling, shape=shape, **local, max_length=None, vllm_max_model_len=513))
    for fitting in ({"max_length": 256}, {"max_length": None, "vllm_max_model_len": 512}):
        assert faults(Sampling, shape=shape, **local, **fitting) == ""
    served = local | {"vllm_mode": "server", "vllm_max_model_len": 512}
    assert re.search(
        f"{refused}--max_length 256 with --max_comp", faults(Sampling, shape=shape, **served, max_length=257)
    )
    assert faults(Sampling, shape=shape, **served, max_length=256) == ""
    assert faults(Sampling, shape=shape_of({"model_type": "llama"}, "m"), **local, max_length=None) == ""


def test_batch_invariance_needs_servers_seeds_and_kernels() -> None:
    dense, served = shape_of({"model_type": "llama"}, "m"), {"vllm_mode": "server", "seed_completions": True}
    assert faults(Sampling, shape=dense, **served, batch_invariant=True) == ""
    refused = faults(Sampling, shape=dense, vllm_mode="colocate", batch_invariant=True)
    assert "or --vllm_mode server" in refused and "add --seed_completions true" in refused
    linear = shape_of({"model_type": "qwen3_next", "linear_num_value_heads": 4}, "m")
    assert "linear attention of --model m" in faults(Sampling, shape=linear, **served, batch_invariant=True)


def test_min_p_reaches_the_requests() -> None:
    sampling = of(Sampling, min_p=0.1).settings()
    assert sampling.min_p == request_config(sampling).min_p == 0.1 and of(Sampling).settings().min_p == 0
    assert "--min_p 1 must be at least 0 and below 1" in faults(Sampling, min_p=1.0)
