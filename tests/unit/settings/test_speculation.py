"""Drafts are refused where they would not be exact or have no test, by flag and with a value that works."""

from __future__ import annotations

import re
from typing import Any

import pytest

from swift_megatron_grpo.settings.layout import DataShape, Facts, Layout, ModelShape
from swift_megatron_grpo.settings.speculation import Speculation
from tests.unit.settings.flags import faults, of

ON = {
    "speculative_rollouts": "history",
    "seed_completions": True,
    "vllm_mode": "server",
    "rollout_quantization": "none",
    "top_p": 1.0,
    "top_k": -1,
    "repetition_penalty": 1.0,
    "sync_check": "canary",
    "vllm_enable_lora": False,
    "vllm_enable_prefix_caching": False,
    "router_replay_mode": "disabled",
    "router_agreement_samples": 0,
}
PREDICTED = {**ON, "speculative_rollouts": "mtp", "vllm_mode": "colocate"}
LEARNS = {**PREDICTED, "mtp_num_layers": 1, "tuner_type": "full", "recompute_granularity": "selective"}
QWEN3_5 = {"model_type": "qwen3_5"}


def shape(**changes: Any) -> ModelShape:
    return ModelShape("m", 8, 2, 64, 4, **{"experts": None, "expert_ffn": None, **changes})


def test_a_dense_text_model_with_seeds_is_served() -> None:
    assert faults(Speculation, shape=shape(), rows=DataShape(0, model_sees=False), **ON) == ""
    assert faults(Speculation, shape=shape(experts=8), rows=DataShape(1), speculative_rollouts="off") == ""


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"seed_completions": False}, "add --seed_completions true"),
        ({"rollout_quantization": "fp8"}, "use --rollout_quantization none"),
        ({"structured_outputs_regex": "a*"}, "--structured_outputs_regex .* use --speculative_rollouts off"),
        ({"min_p": 0.1}, "--min_p 0.1 .* use --min_p 0"),
        ({"rollout_replay": "dump"}, "--rollout_replay does not generate; leave one of them out"),
        ({"speculative_rollouts": "lossy"}, "--speculative_rollouts lossy: unknown value; use "),
        ({"speculative_tokens": 0}, "must be at least 1 and at most 16; use --speculative_tokens 4"),
        ({"speculative_rollouts": "off", "speculative_tokens": 2}, "add that flag, or leave this one out"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused(flags: dict[str, Any], problem: str) -> None:
    assert re.search(problem, faults(Speculation, **{**ON, **flags}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"experts": 8}, "--model m is a mixture of experts"),
        ({"linear_heads": (4, 8)}, "--model m is a model with linear attention"),
        ({"unread_window": 4096}, "--model m is a model with a sliding window"),
    ],
)
def test_other_models_than_dense_ones_are_refused(changes: dict[str, Any], problem: str) -> None:
    message = faults(Speculation, shape=shape(**changes), **ON)
    assert problem in message and message.endswith("use --speculative_rollouts off")


def test_a_model_with_linear_attention_and_experts_may_predict_its_drafts() -> None:
    model = shape(linear_heads=(4, 8), experts=8)
    assert faults(Speculation, shape=model, rows=DataShape(0), config=QWEN3_5, **PREDICTED) == ""


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"vllm_mode": "server"}, "use --vllm_mode colocate, --speculative_rollouts history"),
        ({"vllm_enable_prefix_caching": True}, "43559 .* use --vllm_enable_prefix_caching false"),
        ({"vllm_enable_lora": True}, "use --vllm_enable_lora false"),
        ({"router_replay_mode": "R3"}, "use --router_replay_mode R2 or disabled"),
        ({"router_agreement_samples": 4}, "and --router_agreement_samples 0"),
        ({"sync_check": "off"}, "compares every rollout with the trainer; use --sync_check canary"),
        ({"top_p": 0.9}, "use --top_p 1 --top_k -1 --repetition_penalty 1"),
        ({"top_k": 40}, "use --top_p 1 --top_k -1 --repetition_penalty 1"),
        ({"repetition_penalty": 1.1}, "use --top_p 1 --top_k -1 --repetition_penalty 1"),
        ({"seed_completions": False}, "--speculative_rollouts mtp .* add --seed_completions true"),
    ],
)
def test_what_predicted_drafts_may_get_wrong_is_refused(flags: dict[str, Any], problem: str) -> None:
    assert re.search(problem, faults(Speculation, config=QWEN3_5, **{**PREDICTED, **flags}))
    if "seed_completions" not in flags:
        assert faults(Speculation, **{**ON, **flags}) == ""


def test_rows_with_media_and_untested_types_have_no_predicted_drafts() -> None:
    assert "the datasets have images" in faults(Speculation, rows=DataShape(1), config=QWEN3_5, **PREDICTED)
    message = faults(Speculation, config={"model_type": "glm4_moe"}, **PREDICTED)
    assert "tests compare drafted completions of qwen3_5, qwen3_5_moe, qwen3_next" in message
    assert message.endswith("model_type of --model is glm4_moe; use --speculative_rollouts history or off")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"speculative_rollouts": "history"}, "drafts in rollouts; use --speculative_rollouts mtp, or leave"),
        ({"mtp_num_layers": 2}, "released models have one such layer; use --mtp_num_layers 1, or leave out"),
        ({"mtp_shared_weights": True}, "use --mtp_shared_weights false"),
        ({"mtp_loss_scaling_factor": 0.3}, "optimizer step of its own, which no factor changes; use "),
        ({"tuner_type": "lora"}, "an adapter's checkpoint has no place for it; use --tuner_type full"),
        ({"optimizer": "muon"}, "no test has with Muon; use --optimizer adam"),
        ({"optimizer_cpu_offload": True}, "use --optimizer_cpu_offload false"),
        ({"sync_ref_model": True}, "use --sync_ref_model false"),
        ({"chord_sft_dataset": ["rows"]}, "learns from what the policy samples; use no --chord_sft_dataset"),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
         "use --recompute_method uniform --recompute_num_layers 1"),
    ],
)  # fmt: skip
def test_a_layer_that_drafts_learns_where_a_test_has_it(flags: dict[str, Any], problem: str) -> None:
    assert re.search(f"^--mtp_num_layers . *: .*{problem}", faults(Speculation, **{**LEARNS, **flags}), re.MULTILINE)
    assert faults(Speculation, config=QWEN3_5, **LEARNS) == ""
    assert faults(Speculation, **{**PREDICTED, **flags, "speculative_rollouts": "mtp", "mtp_num_layers": None}) == ""


@pytest.mark.parametrize("size", ["pipeline_model_parallel_size", "context_parallel_size"])
def test_it_learns_on_one_stage_from_whole_sequences(size: str) -> None:
    layout = Layout(2, **{size: 2})
    [fault] = of(Speculation, **LEARNS).faults(Facts(layout))
    assert f"use --{size} 1, or leave out --mtp_num_layers" in fault


def test_it_learns_in_a_qwen3_5_without_experts() -> None:
    assert "--model is qwen3_next; leave it out" in faults(Speculation, config={"model_type": "qwen3_next"}, **LEARNS)


def test_a_model_with_an_image_part_is_refused_also_for_rows_of_text() -> None:
    assert "image part" in faults(Speculation, rows=DataShape(0, model_sees=True), **ON)
