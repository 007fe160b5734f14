"""Names of modules are compared with those that Megatron builds, before it builds them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
from safetensors.torch import save_file
from transformers import AutoConfig

from swift_megatron_grpo.arguments.derived import shape_of
from swift_megatron_grpo.arguments.models import check_modules
from swift_megatron_grpo.cli.tiny_models import TEXT_CONFIGS, TINY
from swift_megatron_grpo.settings.layout import ModelShape
from swift_megatron_grpo.settings.modules import fault_of_names
from swift_megatron_grpo.settings.trained import Trained
from tests.fakes.one_rank import megatron_on_one_rank
from tests.unit.model_config import QWEN3
from tests.unit.settings.flags import faults, of


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    with megatron_on_one_rank():
        yield


@pytest.mark.parametrize("model_type", TEXT_CONFIGS)
def test_every_module_with_weights_that_megatron_builds_is_known(
    model_type: str, megatron: None, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(model_type, **TEXT_CONFIGS[model_type](TINY))
    config.save_pretrained(tmp_path)
    settings = hf_to_mcore_config(AutoConfig.from_pretrained(tmp_path))
    [model] = get_mcore_model(ModelConfig(**settings, params_dtype=torch.float32))
    known = set(shape_of(json.loads((tmp_path / "config.json").read_text()), "m").modules)
    built = {name for name, module in model.named_modules() if list(module.parameters(recurse=False))}
    assert built and {name for name in built if ".local_experts." not in name} <= known


DENSE = shape_of(QWEN3, "m")


def refuse(shape: ModelShape = DENSE, **typed: Any) -> str:
    return faults(Trained, shape=shape, **typed)


@pytest.mark.parametrize(
    ("flag", "names", "advice"),
    [
        ("target_modules", ["linear_qkv", "linear_qvk"], "use --target_modules linear_qkv"),
        ("target_modules", ["q_proj", "k_proj", "linear_fc1"], "use --target_modules linear_qkv linear_fc1"),
        ("target_modules", ["all-linear", "all-router"], "use --target_modules all-linear"),
        ("target_modules", ["self_attention.linear_fc1"], "use --target_modules linear_fc1"),
        ("target_modules", ["layers.99.mlp"], "use --target_modules mlp"),
        ("modules_to_save", ["all-linear"], "use --modules_to_save"),
        ("modules_to_save", ["nosuch"], "leave it out"),
    ],
)
def test_a_name_that_matches_no_module_is_refused(flag: str, names: list[str], advice: str) -> None:
    message = refuse(tuner_type="lora", **{flag: names})
    assert message.startswith(f"--{flag} ") and f"; {advice}" in message
    assert refuse(tuner_type="full", **{flag: names}) == ""


def test_names_and_patterns_of_existing_modules_are_accepted() -> None:
    for names in (["all-linear", "all-embedding"], ["linear_qkv", "mlp.linear_fc2", "output_layer"]):
        assert refuse(tuner_type="lora", target_modules=names, modules_to_save=["all-embedding"]) == ""
    assert refuse(tuner_type="lora", target_regex=r".*layers\.0\..*linear_qkv") == ""
    assert "--target_regex q_proj matches no module" in refuse(tuner_type="lora", target_regex="q_proj")
    moe = shape_of({**QWEN3, "num_experts": 4}, "m")
    assert refuse(moe, tuner_type="lora", target_modules=["all-router", "experts.linear_fc1"]) == ""
    unknown = shape_of({}, "m")  # nothing is known of its layers
    assert refuse(unknown, tuner_type="lora", target_modules=["anything"]) == ""


def test_latent_attention_has_other_projections() -> None:
    latent = shape_of({**QWEN3, "kv_lora_rank": 8}, "m")
    assert refuse(latent, tuner_type="lora", target_modules=["linear_q_proj", "linear_kv_up_proj"]) == ""
    assert "--target_modules linear_qkv: " in refuse(latent, tuner_type="lora", target_modules=["linear_qkv"])


@pytest.mark.parametrize(
    "frozen",
    [{"freeze_parameters": ["decoder", "embedding", "output_layer"]}, {"freeze_parameters_regex": "[a-z]"}],
)
def test_freezing_everything_is_refused_unless_some_of_it_is_trained(frozen: dict[str, Any]) -> None:
    [flag] = frozen
    full = {"tuner_type": "full", **frozen}
    assert f"--{flag} " in (message := refuse(**full)) and "freezes every weight" in message
    assert refuse(**full, trainable_parameters=["decoder.layers.1"]) == ""
    assert refuse(**full, trainable_parameters_regex="layernorm") == ""
    assert refuse(tuner_type="full", freeze_parameters=["embedding", "decoder.layers.0"]) == ""


def test_names_of_a_composite_model_are_those_of_either_part(tmp_path: Path) -> None:
    names = ("model.visual.blocks.0.attn.qkv.weight", "model.language_model.layers.0.self_attn.q_proj.weight")
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    config = {"model_type": "qwen3_vl", "text_config": QWEN3}

    def check(*names: str) -> None:
        check_modules(tmp_path, config, False, of(Trained, tuner_type="lora", target_modules=list(names)))

    check("all-linear")
    check("linear_qkv", "attn.qkv", "linear_fc1")
    with pytest.raises(ValueError, match=r"--target_modules q_proj: .* use --target_modules linear_qkv"):
        check("q_proj")
    with pytest.raises(ValueError, match=r"--target_modules attn\.qvk: this model has no modules of that name"):
        check("linear_qkv", "attn.qvk")


def test_a_message_lists_each_name_once() -> None:
    message = fault_of_names("target_modules", ["q_proj", "v_proj"], DENSE.modules)
    assert message is not None and message.endswith("use --target_modules linear_qkv")
