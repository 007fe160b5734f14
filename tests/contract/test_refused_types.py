"""Find missing upstream what each type of model is refused for; once a test fails, the type may be supported."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from types import SimpleNamespace

import pytest
from mcore_bridge.bridge import gpt_bridge
from mcore_bridge.config import parser
from mcore_bridge.model.mm_gpts import gemma4, kimi_vl
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_experimental_attention_variant_module_spec,
)
from megatron.core.transformer.experimental_attention_variant import dsa
from packaging.version import Version
from swift.template import TEMPLATE_MAPPING
from transformers import AutoConfig

from swift_megatron_grpo.arguments.refused import REFUSED_COMPOSITE, REFUSED_TEXT
from swift_megatron_grpo.cli.check_layouts.layouts import template_for_images


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_megatron_below_0_19_has_no_sparse_attention_of_packed_sequences(model_type: str) -> None:
    assert "megatron-core below 0.19 has no sparse attention" in REFUSED_TEXT[model_type]
    refuses = "Packed sequence is not supported for DSAttention" in inspect.getsource(dsa)
    assert refuses == (Version(version("megatron-core")) < Version("0.19"))


def test_megatron_has_no_attention_of_deepseek_v4() -> None:
    assert "dsv4_hybrid" in REFUSED_TEXT["deepseek_v4"]
    with pytest.raises(ValueError, match="Invalid experimental attention variant: dsv4_hybrid"):
        get_experimental_attention_variant_module_spec(
            SimpleNamespace(experimental_attention_variant="dsv4_hybrid"), backend=object()
        )


def test_mcore_bridge_does_not_read_the_bias_of_the_routers_of_ernie() -> None:
    assert "moe_statics" in REFUSED_TEXT["ernie4_5_moe"] and "moe_statics" not in inspect.getsource(gpt_bridge)


@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_unified"])
def test_mcore_bridge_reads_what_the_config_of_gemma_4_has_no_longer(model_type: str) -> None:
    assert "global_head_dim" in REFUSED_COMPOSITE[model_type] and "global_head_dim" in inspect.getsource(gemma4)
    assert not hasattr(AutoConfig.for_model("gemma4").get_text_config(), "global_head_dim")


def test_mcore_bridge_takes_the_image_part_of_kimi_k25_from_the_checkpoint() -> None:
    assert "trust_remote_code" in REFUSED_COMPOSITE["kimi_k25"]
    assert "get_class_from_dynamic_module" in inspect.getsource(kimi_vl.KimiK25Vit)


def test_mcore_bridge_does_not_read_the_chunks_of_llama_4() -> None:
    assert "attention_chunk_size" in REFUSED_COMPOSITE["llama4"]
    assert AutoConfig.for_model("llama4").get_text_config().attention_chunk_size
    assert all("attention_chunk_size" not in names for names in parser.config_mapping.values())


@pytest.mark.parametrize("model_type", ["llama4", "muse_glimmer"])
def test_ms_swift_has_no_packed_sequences_of_this_type(model_type: str) -> None:
    assert "with padding only" in REFUSED_COMPOSITE[model_type]
    assert not TEMPLATE_MAPPING[template_for_images(model_type)].template_cls.support_padding_free
