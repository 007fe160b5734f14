"""Find missing upstream what each type of model is refused for; once a test fails, the type may be supported."""

from __future__ import annotations

import inspect
import tomllib
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from mcore_bridge.bridge import gpt_bridge
from mcore_bridge.config import parser
from mcore_bridge.model import GPTModel
from mcore_bridge.model.gpts import qwen4_exp
from mcore_bridge.model.mm_gpts import deepseek_v41, gemma4, glm5_next, kimi_vl, qwen3_asr
from mcore_bridge.model.modules import dsa_indexer
from mcore_bridge.model.modules.kernels import qsa_kernels
from mcore_bridge.model.register import MODEL_MAPPING
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_experimental_attention_variant_module_spec,
)
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.experimental_attention_variant import dsa
from packaging.requirements import Requirement
from packaging.version import Version
from swift.model import MODEL_MAPPING as TYPES
from swift.template import TEMPLATE_MAPPING
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from swift_megatron_grpo.arguments.refused import REFUSED_COMPOSITE, REFUSED_TEXT
from swift_megatron_grpo.cli.check_layouts.layouts import template_for_images
from tests.paths import REPOSITORY

MEGATRON = Version(version("megatron-core"))
OF_CHECKPOINTS = [name for name, why in {**REFUSED_TEXT, **REFUSED_COMPOSITE}.items() if "its code is part of" in why]


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_megatron_below_0_19_has_no_sparse_attention_of_packed_sequences(model_type: str) -> None:
    assert "megatron-core below 0.19 has no sparse attention" in REFUSED_TEXT[model_type]
    refuses = "Packed sequence is not supported for DSAttention" in inspect.getsource(dsa)
    assert refuses == (Version("0.19") > MEGATRON) and "this package does not allow" in REFUSED_TEXT[model_type]
    needed = map(Requirement, tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"])
    assert not any(each.name == "megatron-core" and each.specifier.contains("0.19.2") for each in needed)
    assert "fast_hadamard_transform is not installed" in inspect.getsource(dsa.rotate_activation)
    assert "\n        q = rotate_activation(q)\n" in inspect.getsource(dsa_indexer)  # megatron-core can do without


def test_megatron_has_no_attention_of_deepseek_v4() -> None:
    assert "dsv4_hybrid" in REFUSED_TEXT["deepseek_v4"]
    with pytest.raises(ValueError, match="Invalid experimental attention variant: dsv4_hybrid"):
        get_experimental_attention_variant_module_spec(
            SimpleNamespace(experimental_attention_variant="dsv4_hybrid"), backend=object()
        )


def test_the_hybrid_model_has_no_head_that_this_trainer_can_replace() -> None:
    reason, has_model = REFUSED_TEXT["nemotron_h"], find_spec("megatron.core.models.hybrid") is not None
    assert "0.16.1 has none" in reason and has_model == (Version("0.18") <= MEGATRON)
    assert has_model == ("nemotron_h" in MODEL_MAPPING)
    method = "_forward_output_layer"
    assert method in reason and hasattr(GPTModel, method)
    assert not has_model or not hasattr(import_module("mcore_bridge.model.hybrid_model").HybridModel, method)
    assert "mamba-ssm" in reason and "pip install mamba-ssm" in inspect.getsource(MambaMixer.__init__)


def test_megatron_has_no_layers_of_deepseek_v41() -> None:
    """mcore-bridge registers the type where megatron-core has them."""
    name = "hybrid_dsv4_stack_spec"
    assert name in REFUSED_COMPOSITE["deepseek_v41"] and name in inspect.getsource(deepseek_v41)
    assert "deepseek_v41" not in MODEL_MAPPING


def test_megatron_has_nothing_that_the_layers_of_glm5_next_need() -> None:
    assert "mark_keep_in_fp32" in REFUSED_COMPOSITE["glm5_next"]
    with pytest.raises(ImportError, match=r"megatron\.core\.transformer\.module\.mark_keep_in_fp32"):
        glm5_next.require_glm5_hybrid()


def test_the_audio_part_of_qwen3_asr_needs_an_older_transformers() -> None:
    reason = REFUSED_COMPOSITE["qwen3_asr"]
    assert "qwen-asr" in reason and "from qwen_asr." in inspect.getsource(qwen3_asr.Qwen3ASRVit.prepare_model)
    assert "transformers 4.57.6" in reason and "transformers==4.57.6" in TYPES["qwen3_asr"].requires


def test_packed_sequences_of_qwen4_exp_are_attended_by_a_triton_kernel() -> None:
    assert "indexer_budget" in REFUSED_COMPOSITE["qwen4_exp"]
    select = inspect.getsource(qwen4_exp.Qwen4ExpLayer._qsa_select)
    assert "needs_kernel = is_thd or cp_size > 1" in select and "QSA needs the sparse kernel here" in select
    assert "triton" in inspect.getsource(qsa_kernels)


@pytest.mark.parametrize("model_type", OF_CHECKPOINTS)
def test_transformers_has_no_code_of_this_type(model_type: str) -> None:
    assert model_type not in CONFIG_MAPPING_NAMES


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


@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_unified", "llama4", "muse_glimmer"])
def test_ms_swift_has_no_packed_sequences_of_this_type(model_type: str) -> None:
    assert "with padding only" in REFUSED_COMPOSITE[model_type]
    template = template_for_images(model_type.removesuffix("_unified"))  # both Gemma have the same
    assert not TEMPLATE_MAPPING[template].template_cls.support_padding_free
