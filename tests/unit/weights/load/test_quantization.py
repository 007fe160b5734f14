"""Flags and devices that exclude --rollout_quantization, and what it sets in vLLM."""

from __future__ import annotations

import re

import pytest

from swift_megatron_grpo.weights.load.quantization import (
    FP8,
    check_quantization,
    engine_settings,
    mismatch,
    refusal_of_device,
    start_up_notes,
)


@pytest.mark.parametrize(
    ("adapter_only", "dtype", "device", "message"),
    [
        (True, None, None, "fp8 with --vllm_enable_lora true: .*; use --vllm_enable_lora false"),
        (False, "float32", None, "--torch_dtype is float32; use --torch_dtype bfloat16"),
        (False, "bfloat16", "no FP8", "--rollout_quantization fp8: no FP8; use --rollout_quantization none"),
    ],
)
def test_flags_that_exclude_quantized_rollouts(
    adapter_only: bool, dtype: str | None, device: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_quantization("fp8", adapter_only, dtype, device)
    check_quantization("none", adapter_only, dtype, device)
    check_quantization("fp8", False, "bfloat16", None)
    check_quantization("fp8", False, None, None)


def test_devices_without_fp8_are_refused() -> None:
    assert (
        refusal_of_device((9, 0), True) is refusal_of_device((8, 9), True) is refusal_of_device((10, 0), False) is None
    )
    assert refusal_of_device((8, 0), False) == "this GPU has compute capability 8.0, and FP8 needs 8.9"
    assert refusal_of_device(None, has_experts=False) is None
    assert refusal_of_device(None, has_experts=True) == "vLLM has no FP8 mixture of experts on a CPU"


def test_a_run_without_a_correction_is_advised() -> None:
    [note] = start_up_notes("fp8", None, False)
    assert note.endswith("use --rollout_importance_sampling_mode token_truncate")
    assert start_up_notes("fp8", "token_mask", False) == start_up_notes("none", None, True) == []


def test_a_run_that_shares_an_engines_experts_gets_a_note_on_its_speed() -> None:
    [note] = start_up_notes("fp8", "token_mask", True)
    assert "slower" in note and note.endswith("with --rollout_quantization none")


def test_servers_and_trainers_must_agree() -> None:
    assert mismatch("fp8", "fp8") is mismatch("none", "none") is None
    assert "start it with --rollout_quantization fp8, or use --rollout_quantization none" in str(
        mismatch("fp8", "none")
    )
    assert "start it without --rollout_quantization, or use --rollout_qu" in str(mismatch("none", "fp8"))


def test_the_settings_are_those_that_vllm_knows() -> None:
    from vllm.config.quantization import QUANT_KEY_NAMES, resolve_quantization_config

    assert engine_settings("none") == {}
    settings = engine_settings("fp8")
    resolved = resolve_quantization_config(settings["quantization"], settings["quantization_config"])
    assert resolved is not None and resolved.ignore == settings["quantization_config"]["ignore"]
    assert FP8 == "fp8_per_channel"
    for spec in (resolved.linear, resolved.moe):
        assert spec is not None and spec.weight == QUANT_KEY_NAMES["fp8_per_channel_static"]


@pytest.mark.parametrize(
    ("layer", "kept"),
    [
        ("model.layers.0.mlp.gate", True),
        ("model.layers.0.mlp.shared_expert_gate", True),
        ("model.language_model.layers.1.linear_attn.in_proj_ba", True),
        ("visual.blocks.0.attn.qkv", True),
        ("model.visual.blocks.0.attn.qkv", True),
        ("vpm.encoder.layers.0.mlp.fc1", True),
        ("vit_merger.linear_1", True),
        ("merger.mlp.0.linear_1", True),
        ("model.layers.0.mlp.gate_up_proj", False),
        ("model.layers.0.mlp.gate_proj", False),
        ("model.layers.0.mlp.experts", False),
        ("model.layers.0.self_attn.qkv_proj", False),
        ("model.layers.1.linear_attn.in_proj_qkvz", False),
        ("model.layers.1.linear_attn.out_proj", False),
    ],
)
def test_routers_and_parts_for_images_are_not_quantized(layer: str, kept: bool) -> None:
    patterns = engine_settings("fp8")["quantization_config"]["ignore"]
    assert any(re.match(pattern.removeprefix("re:"), layer) for pattern in patterns) is kept
