"""Sizes that a dry run reads from config.json, for each kind of architecture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from swift_megatron_grpo.cli.check.model import read_model
from swift_megatron_grpo.cli.estimate.parameters import Part
from swift_megatron_grpo.cli.tiny_models import save_large_config
from swift_megatron_grpo.generation.protocol.model_identity import media_config

NAMES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration",
    "minicpmv4_6": "MiniCPMV4_6ForConditionalGeneration",
}


@pytest.mark.parametrize("model_type", NAMES)
def test_every_tensor_has_a_part_and_a_layer(model_type: str, tmp_path: Path) -> None:
    model = read_model(save_large_config(tmp_path / "model", model_type, NAMES[model_type]))
    decoder = model.decoder
    layers = {tensor.layer for tensor in model.tensors if tensor.part in (Part.LAYERS, Part.EXPERTS)} - {None}
    assert layers == set(range(decoder.layers))
    assert {tensor.layer for tensor in model.tensors if tensor.part is Part.EXPERTS} == decoder.expert_layers
    seeing = ("_vl", "_5_moe", "omni_moe", "minicpmv4_6")
    assert any(tensor.is_vision_tower for tensor in model.tensors) == model_type.endswith(seeing)
    embeddings = [tensor for tensor in model.tensors if tensor.part is Part.EMBEDDING]
    assert [tensor.shape for tensor in embeddings] == [(decoder.vocabulary, decoder.hidden)]


def test_other_names_of_experts_are_read(tmp_path: Path) -> None:
    """ERNIE's, as mcore-bridge reads them: its first layer is dense by another key."""
    values = AutoConfig.for_model("ernie4_5_moe", num_hidden_layers=6).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(values | {"architectures": ["Ernie4_5_MoeForCausalLM"]}))
    model = read_model(tmp_path)
    decoder = model.decoder
    assert (decoder.experts, decoder.experts_per_token) == (values["moe_num_experts"], values["moe_k"]) == (64, 6)
    assert decoder.shared_ffn == 2 * decoder.expert_ffn == 2 * values["moe_intermediate_size"]
    of_experts = {tensor.layer for tensor in model.tensors if tensor.part is Part.EXPERTS}
    assert decoder.expert_layers == of_experts == {1, 2, 3, 4, 5}


def test_weights_of_layers_take_half_the_memory_in_8_bits(tmp_path: Path) -> None:
    model = read_model(save_large_config(tmp_path / "model", "qwen3", NAMES["qwen3"]))
    outside = 2 * model.decoder.vocabulary * model.decoder.hidden  # embedding and head
    assert model.bytes_in_vllm(2, eight_bits=False) == 2 * model.parameters
    assert model.bytes_in_vllm(2, eight_bits=True) == pytest.approx(model.parameters + outside, rel=1e-3)


def test_attention_that_shares_no_prompt_and_its_cache(tmp_path: Path) -> None:
    dense, latent, delta = (
        read_model(save_large_config(tmp_path / name, name, NAMES[name]))
        for name in ("qwen3", "deepseek_v3", "qwen3_5_moe")
    )
    assert not dense.repeats_prompts and latent.repeats_prompts and delta.repeats_prompts
    assert dense.cached == 2 * dense.decoder.keys * dense.decoder.layers
    assert len(delta.decoder.delta_layers) == delta.decoder.layers * 3 // 4
    assert delta.cached == 2 * delta.decoder.keys * delta.decoder.layers // 4
    assert latent.key_heads == 1 and latent.cached < 2 * latent.decoder.keys * latent.decoder.layers


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_5_moe", "qwen3_omni_moe"])
def test_sizes_of_an_image_part(model_type: str, tmp_path: Path) -> None:
    folder = save_large_config(tmp_path / "model", model_type, NAMES[model_type])
    config = json.loads((folder / "config.json").read_text())
    model, vision = read_model(folder), media_config(config)["vision_config"]
    tower = model.vision_tower
    assert tower is not None and tower.layers == vision["depth"] and tower.rms_norms == (model_type == "qwen2_5_vl")
    assert (tower.hidden, tower.ffn) == (vision["hidden_size"], vision["intermediate_size"])
    assert tower.rows == model.decoder.hidden and tower.values == 3 * 2 * vision["patch_size"] ** 2
    assert model.decoder.normed_heads == (model_type != "qwen2_5_vl") and model.decoder.rotary > 0
    assert any(tensor.is_aligner for tensor in model.tensors)


def test_a_text_model_has_no_image_part(tmp_path: Path) -> None:
    model = read_model(save_large_config(tmp_path / "model", "qwen3", NAMES["qwen3"]))
    assert model.vision_tower is None and model.decoder.rotary == 0 and model.decoder.normed_heads


def test_the_flops_of_experts_are_those_that_a_token_takes(tmp_path: Path) -> None:
    model = read_model(save_large_config(tmp_path / "moe", "qwen3_moe", NAMES["qwen3_moe"]))
    active = model.decoder.experts_per_token * model.decoder.expert_ffn
    assert active and model.flops.of_sequence(100, 50) < 2.5 * 100 * model.parameters
