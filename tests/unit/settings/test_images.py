"""Runs on images: what is trained, limits of vLLM, and layouts that a vision tower excludes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from swift_megatron_grpo.settings.images import Images
from swift_megatron_grpo.settings.layout import DataShape, Facts, Layout, ModelShape, layers_of_stages
from swift_megatron_grpo.settings.servers import Engine
from tests.unit.settings.flags import faults, of

THREE = {"deepstack_visual_indexes": [1, 2, 3], "num_heads": 6}
PARTS: dict[str, Any] = {"tuner_type": "full", "freeze_vit": False, "freeze_aligner": False}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"language_model_only": True},
            "--language_model_only true builds no image or audio part.*use --language_model_only f",
        ),
        ({"images": 0}, "--freeze_vit false: no row of the dataset has images.*use --freeze_vit true"),
        ({"images": 0, "freeze_vit": True}, "--freeze_aligner false: no row"),
        ({"freeze_vit": True, "vit_lr": 1e-5}, "--vit_lr 1e-05: the part .* use --freeze_vit false, or leave --vit_lr"),
        ({"freeze_aligner": True, "aligner_lr": 0.1}, "--aligner_lr 0.1: .* use --freeze_aligner false"),
        ({"vllm_enable_lora": True, "tuner_type": "lora"}, "--vllm_enable_lora true with --freeze_vit false.*_lora f"),
    ],
)
def test_parts_that_cannot_be_trained_are_refused(values: dict[str, Any], message: str) -> None:
    assert faults(Images, rows=DataShape(1), **PARTS) == ""
    typed = PARTS | values
    assert re.search(message, faults(Images, rows=DataShape(typed.pop("images", 1)), **typed), re.DOTALL)


def test_a_limit_below_the_images_of_a_row_is_refused() -> None:
    for limits in (None, {"video": 0}, {"image": 3}):
        assert faults(Engine, rows=DataShape(3), vllm_limit_mm_per_prompt=limits) == ""
    message = faults(Engine, rows=DataShape(3), vllm_limit_mm_per_prompt={"image": 2})
    assert re.search(r"allows 2 of image, .* has 3; use .*'\{\"image\": 3, \"video\": 0\}'", message)


def test_recordings_fit_the_limit() -> None:
    rows = DataShape(0, recordings=2)
    for limits in (None, {"image": 0}, {"audio": 2}):
        assert faults(Engine, rows=rows, vllm_limit_mm_per_prompt=limits) == ""
    message = faults(Engine, rows=rows, vllm_limit_mm_per_prompt={"audio": 1})
    assert re.search(r"allows 1 of audio, .* has 2; use .*'\{\"image\": 0, \"video\": 0, \"audio\": 2\}'", message)
    assert faults(Images, rows=rows) == "" and faults(Images, rows=rows, **PARTS) == ""
    message = faults(Images, rows=rows, language_model_only=True)
    assert "rows of the dataset have recordings" in message and "remove the column audios" in message


def test_videos_fit_the_limit() -> None:
    rows = DataShape(1, videos=2)
    for limits in (None, {"image": 1}, {"video": 2}, {"video": {"count": 2, "num_frames": 8}}):
        assert faults(Engine, rows=rows, vllm_limit_mm_per_prompt=limits) == ""
    message = faults(Engine, rows=rows, vllm_limit_mm_per_prompt={"video": 1})
    assert re.search(r"allows 1 of video, .* has 2; use .*'\{\"image\": 1, \"video\": 2\}'", message)
    assert faults(Images, rows=rows) == "" and faults(Images, rows=DataShape(0, videos=1), **PARTS) == ""
    message = faults(Images, rows=DataShape(0, videos=1), language_model_only=True)
    assert "rows of the dataset have videos" in message and "remove the column videos" in message


def of_vision(vision: dict[str, Any], layout: Layout, **typed: Any) -> str:
    shape = ModelShape("m", None, None, None, 12, None, None)
    of_vl, of_omni = {"vision_config": vision}, {"thinker_config": {"vision_config": vision}}
    [one, other] = [
        "\n".join(of(Images, **typed).faults(Facts(layout, config, shape, DataShape(1)))) for config in (of_vl, of_omni)
    ]
    assert one == other
    return one


def test_vllm_divides_the_heads_of_the_vision_tower() -> None:
    assert of_vision(THREE, Layout(12), vllm_tensor_parallel_size=3) == ""
    data = {"mm_encoder_tp_mode": "data"}
    assert of_vision(THREE, Layout(12), vllm_tensor_parallel_size=4, vllm_engine_kwargs=data) == ""
    assert of_vision({}, Layout(12), vllm_tensor_parallel_size=4) == ""
    message = of_vision(THREE, Layout(12), vllm_tensor_parallel_size=4)
    assert "--vllm_tensor_parallel_size 4 does not divide the 6 attention heads" in message


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        (Layout(2, pipeline_model_parallel_size=2), 6),
        (Layout(2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=3), 2),
        (Layout(4, pipeline_model_parallel_size=4, last_stage_layers=3), 3),
        (Layout(2, pipeline_model_parallel_size=2, first_stage_layers=4), 4),
        (Layout(7, pipeline_model_parallel_size=7, extra_layers=2), 1),
        (Layout(2, pipeline_model_parallel_size=2, stages="Ettt|t*9L"), 3),
    ],
)
def test_the_first_stage_has_the_layers_that_take_rows_of_the_tower(layout: Layout, layers: int) -> None:
    assert layers_of_stages(layout, 12)[0] == layers
    assert of_vision({}, layout) == ""
    expected = "" if layers >= 3 else f"has {layers} layers, .* adds to the first 3 layers.*; use --"
    assert re.search(expected, message := of_vision(THREE, layout)) and bool(message) == (layers < 3)


def test_a_training_pass_has_the_work_of_what_is_trained() -> None:
    def share(freeze_vit: bool, freeze_aligner: bool, images: int = 1) -> float:
        return of(Images, freeze_vit=freeze_vit, freeze_aligner=freeze_aligner).trained_share(images)

    assert share(False, True) == share(False, False) == 1.0
    assert share(True, False) == 1 / 3 and share(True, True) == share(False, False, images=0) == 0.0
