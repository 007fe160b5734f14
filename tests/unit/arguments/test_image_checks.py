"""Runs on images: what is trained, limits of vLLM, and layouts that a vision tower excludes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from swift_megatron_grpo.arguments.image_checks import (
    check_deepstack,
    check_parts,
    check_vision_tower_heads,
    layers_of_first_stage,
    vision_tower_share,
)
from swift_megatron_grpo.settings.facts import DataShape
from swift_megatron_grpo.settings.layout import Layout
from swift_megatron_grpo.settings.servers import Engine
from tests.unit.settings.flags import faults

PARTS: dict[str, Any] = {
    "images": 1,
    "freeze_vit": False,
    "freeze_aligner": False,
    "language_model_only": False,
    "adapter_only": False,
    "has_adapter": False,
}
THREE = {"deepstack_visual_indexes": [1, 2, 3], "num_heads": 6}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"language_model_only": True}, "--language_model_only true builds no image part.*use --language_model_only f"),
        ({"images": 0}, "--freeze_vit false: no row of the dataset has images.*use --freeze_vit true"),
        ({"images": 0, "freeze_vit": True}, "--freeze_aligner false: no row"),
        ({"freeze_vit": True, "vit_lr": 1e-5}, "--vit_lr 1e-05: the part .* use --freeze_vit false, or leave --vit_lr"),
        ({"freeze_aligner": True, "aligner_lr": 0.1}, "--aligner_lr 0.1: .* use --freeze_aligner false"),
        ({"adapter_only": True, "has_adapter": True}, "--vllm_enable_lora true with --freeze_vit false.*_lora false"),
    ],
)
def test_parts_that_cannot_be_trained_are_refused(values: dict[str, Any], message: str) -> None:
    check_parts(**PARTS)
    with pytest.raises(ValueError, match=message):
        check_parts(**{**PARTS, **values})


def test_a_limit_below_the_images_of_a_row_is_refused() -> None:
    for limits in (None, {"video": 0}, {"image": 3}):
        assert faults(Engine, rows=DataShape(3), vllm_limit_mm_per_prompt=limits) == ""
    message = faults(Engine, rows=DataShape(3), vllm_limit_mm_per_prompt={"image": 2})
    assert re.search(r"allows 2 images, .* has 3; use .*'\{\"image\": 3, \"video\": 0\}'", message)


def test_vllm_divides_the_heads_of_the_tower() -> None:
    check_vision_tower_heads(THREE, 3, None)
    check_vision_tower_heads(THREE, 4, {"mm_encoder_tp_mode": "data"})
    check_vision_tower_heads({}, 4, None)
    with pytest.raises(ValueError, match="--vllm_tensor_parallel_size 4 does not divide the 6 attention heads"):
        check_vision_tower_heads(THREE, 4, {})


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        (Layout(2, pipeline_model_parallel_size=2), 6),
        (Layout(2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=3), 2),
        (Layout(4, pipeline_model_parallel_size=4, last_stage_layers=3), 3),
        (Layout(2, pipeline_model_parallel_size=2, first_stage_layers=4), 4),
        (Layout(2, pipeline_model_parallel_size=2, stages="Ettt|t*9L"), 3),
    ],
)
def test_the_first_stage_has_the_layers_that_take_rows_of_the_tower(layout: Layout, layers: int) -> None:
    assert layers_of_first_stage(layout, 12) == layers
    check_deepstack({}, layout, 12)
    if layers >= 3:
        check_deepstack(THREE, layout, 12)
    else:
        with pytest.raises(ValueError, match=f"has {layers} layers, .* adds to the first 3 layers.*; use --"):
            check_deepstack(THREE, layout, 12)


def test_a_training_pass_has_the_work_of_what_is_trained() -> None:
    assert vision_tower_share(False, True) == vision_tower_share(False, False) == 1.0
    assert vision_tower_share(True, False) == 1 / 3 and vision_tower_share(True, True) == 0.0
