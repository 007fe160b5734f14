"""Names and behaviour of mcore-bridge, transformers, ms-swift and vLLM that rows with images rely on."""

from __future__ import annotations

import inspect
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
from mcore_bridge import GPTBridge
from mcore_bridge.model import MultimodalGPTModel
from mcore_bridge.model.mm_gpts import qwen3_omni, qwen3_vl
from mcore_bridge.model.mm_gpts.utils import HuggingFaceVit
from mcore_bridge.model.register import MODEL_MAPPING
from mcore_bridge.tuners import lora
from megatron.core.models.huggingface import HuggingFaceModule
from peft.tuners.lora import Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from qwen_vl_utils.vision_process import smart_resize
from swift.megatron.utils.utils import prepare_adapter
from swift.template.vision_utils import load_file
from transformers import InternVLModel
from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel
from transformers.models.glm4v_moe.configuration_glm4v_moe import Glm4vMoeVisionConfig
from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeVisionModel

from swift_megatron_grpo.arguments.refused import COMPOSITE
from swift_megatron_grpo.training.reference import REFERENCE_ADAPTER
from tests.support.interpreter import result_of

VISION_TOWERS = {
    kind: meta.visual_cls for meta in MODEL_MAPPING.values() for kind in meta.model_types if kind in COMPOSITE
}
TRANSFORMERS = {"qwen2_vl": "Qwen2VisionTransformerPretrainedModel",
                "qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel", "qwen3_vl": "Qwen3VLVisionModel",
                "qwen3_vl_moe": "Qwen3VLMoeVisionModel", "qwen3_5": "Qwen3_5VisionModel",
                "qwen3_5_moe": "Qwen3_5MoeVisionModel", "glm4v": "Glm4vVisionModel",
                "glm4v_moe": "Glm4vMoeVisionModel"}  # fmt: skip


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_a_tower_is_asked_once_with_patches_and_grids(kind: str) -> None:
    """training/vision_tower.py replaces `get_inputs_embeds`, and gives the tower's own call rows that it has."""
    assert list(inspect.signature(VISION_TOWERS[kind].get_inputs_embeds).parameters) == [
        "self",
        "inputs_embeds",
        "kwargs",
    ]
    embed = qwen3_vl.Qwen3VL_Vit._get_inputs_embeds if "qwen3_vl" in kind else HuggingFaceVit._hf_get_inputs_embeds
    source = inspect.getsource(embed)
    assert source.count("visual(pixel_values_mixed, grid_thw=grid_thw)") == 1 and ".pooler_output" in source
    assert "input_ids == hf_config.image_token_id" in source  # a sampled placeholder would be taken for an image
    for name in ("pixel_values", "image_grid_thw"):
        assert f".get('{name}')" in source
    module = import_module(f"transformers.models.{kind}.modeling_{kind}")
    assert list(inspect.signature(getattr(module, TRANSFORMERS[kind]).forward).parameters)[:3] == [
        "self", "hidden_states", "grid_thw"
    ]  # fmt: skip


def test_a_tower_of_tiles_is_asked_once_with_its_aligner() -> None:
    """training/vision_tower.py replaces `get_image_features` of mcore-bridge's wrapper."""
    towers = VISION_TOWERS["internvl"]
    assert {*TRANSFORMERS, "internvl"} == {*COMPOSITE} and not hasattr(towers, "visual")
    source = inspect.getsource(towers.get_inputs_embeds)
    assert source.count("image_features = self.get_image_features(\n                pixel_values,") == 1
    assert "special_image_mask = input_ids == self.hf_config.image_token_id" in source
    assert "image_features = image_features.pooler_output" in source
    assert "return self.model_cls.get_image_features(self, *args, **kwargs)" in inspect.getsource(
        towers.get_image_features
    )
    assert "vision_outputs.pooler_output = vision_features" in inspect.getsource(InternVLModel.get_image_features)


def test_an_omni_model_sees_like_a_qwen3_vl_and_hears_a_blank_recording() -> None:
    """training/vision_tower.py gives `get_audio_features` the answer to the blank one."""
    source = inspect.getsource(qwen3_omni.Qwen3Omni_Vit.get_inputs_embeds)
    assert "Qwen3VL_Vit._get_inputs_embeds(self, inputs_embeds, kwargs, visual, hf_config)" in source
    assert "hf_config = self.hf_config.thinker_config" in source and "visual = self.visual" in source
    assert source.count("audio_res = self.get_audio_features(input_features, feature_attention_mask)") == 2
    assert "inputs_embeds = inputs_embeds + audio_embeds.mean() * 0." in source


def test_mcore_bridge_builds_the_vision_tower_of_the_mixture_for_both_glms() -> None:
    """Both types of GLM get the vision tower of the mixture, and it computes the same."""
    sizes = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
             "image_size": 112, "attn_implementation": "eager"}  # fmt: skip
    dense = Glm4vVisionModel(Glm4vVisionConfig(**sizes)).eval()
    mixture = Glm4vMoeVisionModel(Glm4vMoeVisionConfig(**sizes)).eval()
    mixture.load_state_dict(dense.state_dict())
    assert "Glm4vMoeVisionModel._from_config" in inspect.getsource(VISION_TOWERS["glm4v"].prepare_model)
    patches, grids = torch.randn(24 + 16, 3 * 2 * 14 * 14), torch.tensor([[1, 4, 6], [1, 4, 4]])
    expected, found = (tower(patches, grid_thw=grids).pooler_output for tower in (dense, mixture))
    assert torch.equal(expected, found)


def test_feed_forwards_are_read_as_stored_and_exported_in_two_parts() -> None:
    """joined_projections.py joins them; delete it when upstream asks for experts and for others alike."""
    source = inspect.getsource(GPTBridge._set_mlp_state)
    assert "is_gate_up = any('gate_up_proj' in k for k in hf_state_dict.keys())" in source
    assert "if not to_mcore and is_expert:\n            hf_grouped, is_gate_up = self._get_hf_experts_attr" in source
    assert list(inspect.signature(GPTBridge._set_mlp_state).parameters)[1:7] == [
        "mg_mlp", "hf_state_dict", "hf_prefix", "layer_idx", "to_mcore", "ep_rank"
    ]  # fmt: skip


def test_rows_of_several_layers_are_cut_over_sequence_parallel_ranks() -> None:
    """VisionTowerGuard sums their gradients: Megatron averages the gradients of a vision tower over the ranks."""
    source = inspect.getsource(qwen3_vl.Qwen3VL_Vit._get_inputs_embeds)
    assert "deepstack_visual_embeds[:, visual_start:visual_end]" in source
    assert "visual_res.deepstack_features" in source
    assert "average_gradients_across_tp_domain" in inspect.getsource(HuggingFaceModule)
    assert issubclass(HuggingFaceVit, HuggingFaceModule)


def test_the_rows_of_several_layers_must_be_on_the_first_stage() -> None:
    """settings/images.py refuses at start what would fail here."""
    block = inspect.getsource(qwen3_vl)
    assert "assert len(deepstack_visual_embeds) <= len(" in block


def test_embeddings_are_cut_if_ids_are_those_of_all_context_parallel_ranks() -> None:
    source = inspect.getsource(MultimodalGPTModel.forward)
    assert "needs_split" in source and "position_ids" in source


def test_the_parts_of_a_model_have_names_for_flags() -> None:
    """--freeze_vit, --freeze_aligner, --vit_lr and --aligner_lr select by these names."""
    for kind in COMPOSITE:
        assert VISION_TOWERS[kind]._vision_tower and VISION_TOWERS[kind]._aligner


def test_layers_with_an_adapter_in_a_tower_are_those_of_peft() -> None:
    """weights/export/export.py merges them."""
    assert issubclass(lora.LoraParallelLinear, BaseTunerLayer) and issubclass(Linear, BaseTunerLayer)
    assert list(inspect.signature(Linear.get_delta_weight).parameters) == ["self", "adapter"]


def test_the_reference_adapter_is_frozen_and_layers_run_the_active_one() -> None:
    """training/reference.py sets `_active_adapter` of every layer for a pass."""
    source = inspect.getsource(prepare_adapter)
    assert f"model.add_adapter('{REFERENCE_ADAPTER}', lora_config)" in source and "p.requires_grad = False" in source
    assert "return self._active_adapter" in inspect.getsource(BaseTunerLayer.active_adapter.fget)  # type: ignore[attr-defined]
    assert "for active_adapter in self.active_adapters" in inspect.getsource(lora.LoraParallelLinear.forward)


def test_sizes_and_files_of_images_are_read_by_these_functions() -> None:
    assert list(inspect.signature(smart_resize).parameters) == ["height", "width", "factor", "min_pixels", "max_pixels"]
    assert load_file(b"content").getvalue() == b"content" and load_file("Y29udGVudA==").getvalue() == b"content"


@cache
def upstream() -> dict[str, Any]:
    result: dict[str, Any] = result_of(
        """
        from swift.infer_engine import VllmEngine
        from swift.template import Template
        from swift.template.templates.qwen import Qwen2VLTemplate
        from swift.template.vision_utils import rescale_image
        from vllm.config import ModelConfig
        from vllm.config.multimodal import MultiModalConfig
        from vllm.inputs import TokensPrompt
        from vllm.model_executor.models.interns1 import InternS1MultiModalProcessor
        from vllm.multimodal import MULTIMODAL_REGISTRY

        result = {
            "_get_num_tokens": parameters(VllmEngine._get_num_tokens),
            "room": source(VllmEngine.set_default_max_tokens),
            "_add_request": source(VllmEngine._add_request),
            "modes": source(Template.set_mode),
            "rescale_image": source(rescale_image),
            "replace_tag": source(Qwen2VLTemplate.replace_tag),
            "tiles": source(InternS1MultiModalProcessor._get_prompt_updates),
            "limits": parameters(MultiModalConfig.get_limit_per_prompt),
            "supports": hasattr(ModelConfig, "supports_multimodal_inputs")
            or hasattr(MULTIMODAL_REGISTRY, "supports_multimodal_inputs"),
            "is_multimodal_model": hasattr(ModelConfig, "is_multimodal_model"),
            "prompt": sorted(TokensPrompt.__annotations__),
            "mm": sorted(MultiModalConfig.__dataclass_fields__),
        }
        """
    )
    return result


def test_ms_swift_counts_an_image_as_one_token() -> None:
    """generation/vllm/rollout_engine.RolloutEngine counts all of them, in the method that limits completions."""
    assert upstream()["_get_num_tokens"][0] == "inputs" and "self._get_num_tokens(inputs)" in upstream()["room"]


def test_images_reach_vllm_as_the_template_has_resized_them() -> None:
    assert "'multi_modal_data'" in upstream()["_add_request"] and "'mm_processor_kwargs'" in upstream()["_add_request"]
    assert "max_pixels" in upstream()["rescale_image"] and "fetch_image" in upstream()["replace_tag"]
    assert "vllm" in upstream()["modes"]


def test_vllm_marks_start_and_end_of_an_image_in_tiles() -> None:
    assert "repl_full = start_image_token + repl_features + end_image_token" in upstream()["tiles"]
    assert "feature_size = num_patches * hf_processor.image_seq_length" in upstream()["tiles"]


def test_vllm_limits_images_and_leaves_towers_out() -> None:
    assert upstream()["limits"] == ["self", "modality"]
    assert upstream()["supports"] and upstream()["is_multimodal_model"]
    assert {"limit_per_prompt", "mm_encoder_tp_mode"} <= set(upstream()["mm"])
    assert {"multi_modal_data", "mm_processor_kwargs"} <= set(upstream()["prompt"])
