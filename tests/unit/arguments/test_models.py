"""Composite models: which are accepted for text rows, with which flags, and what is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from mcore_bridge.config.parser import hf_to_mcore_config
from mcore_bridge.model.constant import MLLMModelType
from mcore_bridge.model.register import MODEL_MAPPING, get_mcore_model_type
from transformers import AutoConfig

from swift_megatron_grpo.arguments.derived import DerivedArguments
from swift_megatron_grpo.arguments.models import (
    check_attention_layers,
    check_composite,
    check_engine,
    check_flash_attention,
    check_kernels,
    check_sinks,
    check_type,
)
from swift_megatron_grpo.arguments.refused import (
    ALL_COMPOSITE,
    COMPOSITE,
    INTERNVL_LANGUAGES,
    ON_TEXT_ALONE,
    READ_AS,
    REFUSED_COMPOSITE,
    REFUSED_TEXT,
    TEXT,
    WITHOUT_ENGINE,
)
from swift_megatron_grpo.cli.tiny_models import TEXT_CONFIGS, TINY
from swift_megatron_grpo.platforms.attention_packages import fault_of_delta_rule
from tests.support.text_types import CONFIGS, IN_VLLM_ON_CPU

FROZEN = (False, True, True)
LINEAR, FULL = "linear_attention", "full_attention"


def test_every_type_of_mcore_bridge_is_supported_or_refused_with_a_reason() -> None:
    """mcore-bridge registers deepseek_v41 only if megatron-core has a HybridModel with its layers."""
    converted = {name for meta in MODEL_MAPPING.values() if meta.is_multimodal for name in meta.model_types}
    assert converted | {"deepseek_v41"} == {*ALL_COMPOSITE, *REFUSED_COMPOSITE}
    names = {name for key, name in vars(MLLMModelType).items() if not key.startswith("_")}
    assert names - {"deepseek_v41"} == {name for name, meta in MODEL_MAPPING.items() if meta.is_multimodal}
    assert all(reason and not reason.endswith(".") for reason in [*REFUSED_COMPOSITE.values(), *REFUSED_TEXT.values()])
    assert not {*ALL_COMPOSITE} & {*REFUSED_COMPOSITE} and len({*ALL_COMPOSITE}) == len(ALL_COMPOSITE)
    text = [name for meta in MODEL_MAPPING.values() if not meta.is_multimodal for name in meta.model_types]
    assert {*text, "nemotron_h"} == {*TEXT, *READ_AS, *REFUSED_TEXT}  # nemotron_h: as deepseek_v41
    assert not {*TEXT, *READ_AS} & {*REFUSED_TEXT}


@pytest.mark.parametrize(("model_type", "base"), READ_AS.items())
def test_a_type_read_as_another_gets_the_same_model(model_type: str, base: str) -> None:
    config = AutoConfig.for_model(base, **TEXT_CONFIGS[base](TINY))
    expected = hf_to_mcore_config(config)
    config.model_type = model_type
    own = hf_to_mcore_config(config)
    same = own.keys() - {"hf_config", "hf_model_type", "llm_model_type"}
    assert own.keys() == expected.keys() and all(own[name] == expected[name] for name in same)
    assert get_mcore_model_type(model_type) == get_mcore_model_type(base) == "gpt"


@pytest.mark.parametrize("model_type", [*ALL_COMPOSITE, *TEXT, *READ_AS])
def test_a_type_that_was_compared_is_accepted(model_type: str) -> None:
    check_type("m", {"model_type": model_type}, model_type in ALL_COMPOSITE)


@pytest.mark.parametrize("model_type", ALL_COMPOSITE)
def test_text_of_a_supported_type_is_trained_with_frozen_towers(model_type: str) -> None:
    check_composite("m", {"model_type": model_type, "text_config": {"model_type": "qwen3"}}, FROZEN)


@pytest.mark.parametrize("model_type", ALL_COMPOSITE)
def test_rows_with_images_are_those_of_types_compared_on_them(model_type: str) -> None:
    args: Any = SimpleNamespace(is_multimodal=True, model_config={"model_type": model_type})
    assert vars(DerivedArguments)["takes_images"].fget(args) == (model_type in (*COMPOSITE, "qwen3_omni_moe"))
    assert vars(DerivedArguments)["takes_recordings"].fget(args) == (model_type == "qwen3_omni_moe")


@pytest.mark.parametrize("model_type", ["qwen2_5_omni", *ON_TEXT_ALONE])
@pytest.mark.parametrize(
    ("frozen", "flag"), [((False, False, True), "freeze_vit"), ((True, True, False), "freeze_aligner")]
)
def test_parts_of_a_model_without_rows_of_media_are_not_trained(
    model_type: str, frozen: tuple[bool, bool, bool], flag: str
) -> None:
    check_composite("m", {"model_type": "qwen3_omni_moe", "text_config": {"model_type": "qwen3"}}, frozen)
    with pytest.raises(ValueError, match=f"--{flag} false: a {model_type} is trained on .* text .*; use --{flag} true"):
        check_composite("m", {"model_type": model_type, "text_config": {"model_type": "qwen3"}}, frozen)


@pytest.mark.parametrize("model_type", [*REFUSED_COMPOSITE, "mystery_vl"])
def test_another_type_is_refused_by_name(model_type: str) -> None:
    with pytest.raises(ValueError, match=f"{model_type} is a model with an image.*: .*use a text model.*qwen3_5"):
        check_type("m", {"model_type": model_type}, is_multimodal=True)


@pytest.mark.parametrize("model_type", REFUSED_TEXT)
def test_another_text_type_is_refused_with_what_is_missing(model_type: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_type("m", {"model_type": model_type}, is_multimodal=False)
    assert str(caught.value).startswith(f"--model m: {model_type} is not supported: {REFUSED_TEXT[model_type]}; use a ")


@pytest.mark.parametrize("backend", ["flash", "flash_2", "flash_3", "flash_4"])
def test_attention_sinks_are_refused_with_flash_attention(backend: str) -> None:
    check_sinks("m", {"model_type": "qwen3"}, backend)
    for other in ("unfused", "fused", "auto"):
        check_sinks("m", {"model_type": "gpt_oss"}, other)
    with pytest.raises(ValueError, match=f"--attention_backend {backend}: .* use --attention_backend unfused"):
        check_sinks("m", {"model_type": "gpt_oss"}, backend)


def test_vllm_in_the_trainer_is_refused_for_a_type_that_it_does_not_have() -> None:
    check_engine("m", {"model_type": "dots1"}, "server")
    check_engine("m", {"model_type": "qwen3"}, "colocate")
    with pytest.raises(ValueError, match=r"--vllm_mode colocate: --model m is a dots1, .* use --vllm_mode server"):
        check_engine("m", {"model_type": "dots1"}, "colocate")


def test_every_text_type_has_tests_of_its_numbers_and_with_vllm() -> None:
    """Other tests have trained these four in every layout, with vLLM where it can run them on a CPU."""
    elsewhere = {"qwen3", "qwen3_moe", "qwen3_next", "deepseek_v3"}
    assert elsewhere | CONFIGS.keys() == {*TEXT} and not elsewhere & CONFIGS.keys()
    assert CONFIGS.keys() - {*WITHOUT_ENGINE} == {*IN_VLLM_ON_CPU}


def test_an_internvl_needs_a_language_model_with_which_it_was_compared() -> None:
    def check(model_type: str, language: dict[str, Any]) -> None:
        check_composite("m", {"model_type": model_type, "text_config": language}, FROZEN)

    for kind in INTERNVL_LANGUAGES:
        check("internvl", {"model_type": kind})
    check("glm4v", {"model_type": "glm4v_text"})
    with pytest.raises(ValueError, match=r"--model m: .* of type gpt_oss, .* use one with qwen2, qwen3, qwen3_moe, or"):
        check("internvl", {"model_type": "gpt_oss"})


@pytest.mark.parametrize("frozen", [(False, True, True), (True, False, True), (True, True, False)])
def test_one_part_at_least_is_trained(frozen: tuple[bool, bool, bool]) -> None:
    config = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}
    check_composite("m", config, frozen)
    with pytest.raises(
        ValueError, match="--freeze_llm true, --freeze_vit true and --freeze_aligner true leave nothing"
    ):
        check_composite("m", config, (True, True, True))


def described(layers: list[str] | None, interval: int | None, composed: bool) -> dict[str, Any]:
    text: dict[str, Any] = {"num_hidden_layers": 4, "linear_num_key_heads": 2}
    text |= {} if layers is None else {"layer_types": layers}
    text |= {} if interval is None else {"full_attention_interval": interval}
    return {"model_type": "qwen3_5", "text_config": text} if composed else text


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize(
    ("layers", "interval"),
    [([LINEAR, FULL] * 2, 2), ([LINEAR] * 3 + [FULL], 4), ([LINEAR] * 3 + [FULL], None), (None, 4), (None, None)],
)
def test_attention_layers_that_megatron_builds_are_accepted(
    layers: list[str] | None, interval: int | None, composed: bool
) -> None:
    check_attention_layers("m", described(layers, interval, composed))


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize(
    ("layers", "interval", "layer", "advice"),
    [
        ([LINEAR, FULL] * 2, None, 1, '"full_attention_interval": 2'),
        ([LINEAR, FULL] * 2, 4, 1, '"full_attention_interval": 2'),
        (None, 2, 1, '"full_attention_interval": 2'),
        ([FULL, LINEAR, LINEAR, FULL], 4, 0, "use another model"),
        ([LINEAR] * 4, 4, 3, '"full_attention_interval": 5|use another model'),
    ],
)
def test_other_attention_layers_are_refused_by_number(
    layers: list[str] | None, interval: int | None, layer: int, advice: str, composed: bool
) -> None:
    with pytest.raises(ValueError, match=rf"--model m: by its config.json layer {layer} has .*({advice})"):
        check_attention_layers("m", described(layers, interval, composed))


def test_a_model_without_linear_attention_is_not_checked() -> None:
    check_attention_layers("m", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", FULL]})


def test_linear_attention_needs_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    check_kernels("m", described(None, 4, True), on_hopper=False)  # the CPU platform has them
    monkeypatch.setattr("swift_megatron_grpo.arguments.models.find_spec", lambda name: None)
    check_kernels("m", {"num_hidden_layers": 2}, on_hopper=True)
    with pytest.raises(ValueError, match="--model m has linear attention, which needs flash-linear-attention"):
        check_kernels("m", described(None, 4, True), on_hopper=True)


@pytest.mark.parametrize(
    ("triton", "tilelang", "right"),
    [("3.3.1", False, True), ("3.4.0", False, False), ("3.6.0", False, False), ("3.6.0", True, True),
     ("3.7.1", False, True)],
)  # fmt: skip
def test_wrong_linear_attention_kernels_on_hopper_are_refused_with_a_fix(
    triton: str, tilelang: bool, right: bool
) -> None:
    fault = fault_of_delta_rule(triton, tilelang)
    assert fault is None if right else fault is not None and "pip install tilelang" in fault


@pytest.mark.parametrize(
    ("backend", "cp_size", "installed"), [("flash", 2, True), ("flash", 1, False), ("fused", 2, False)]
)
def test_attention_that_finds_a_kernel_is_accepted(backend: str, cp_size: int, installed: bool) -> None:
    check_flash_attention(backend, cp_size, installed)


def test_ring_attention_without_flash_attn_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"--context_parallel_size 2 .* needs flash-attn.* use --attention_backend fused"
    ):
        check_flash_attention("flash", 2, has_flash_attention=False)
