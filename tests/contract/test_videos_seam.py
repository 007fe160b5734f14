"""Positions of videos: vLLM's, which its completions follow, and where those of transformers differ."""

from __future__ import annotations

import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen3OmniMoeProcessor
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessingInfo
from vllm.model_executor.models.qwen3_omni_moe_thinker import Qwen3OmniMoeThinkerForConditionalGeneration
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration

from swift_megatron_grpo.generation.vllm.images import drops_marks_of_videos, knows_times_of_frames
from swift_megatron_grpo.packing.images import positions_of
from swift_megatron_grpo.types import ModelFrames, ModelImage, PlacedImage

START, END, VIDEO, IMAGE = 1, 2, 3, 4


def no_pixels() -> torch.Tensor:
    raise AssertionError("pixels are read by towers only")


def frames(time: int, height: int, width: int, **others: Any) -> ModelFrames:
    return ModelFrames("d", (time, 2 * height, 2 * width), 2, ((1.0, 0.0),) * 3, no_pixels, **others)


def feature(kind: str, offset: int, grid: tuple[int, ...], seconds: float | None = None) -> SimpleNamespace:
    data = {f"{kind}_grid_thw": SimpleNamespace(data=torch.tensor(grid))}
    if seconds is not None:
        data["second_per_grid_ts"] = SimpleNamespace(data=torch.tensor(seconds))
    return SimpleNamespace(mm_position=SimpleNamespace(offset=offset), modality=kind, data=data)


def vllm_positions(seconds: float, video: ModelFrames, image: ModelImage, starts: list[int], length: int) -> Any:
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=2))
    model = SimpleNamespace(config=config)
    model.iter_mm_grid_thw = partial(Qwen2_5_VLForConditionalGeneration.iter_mm_grid_thw, model)
    shown = [feature("video", starts[0], video.grid, seconds), feature("image", starts[1], image.grid)]
    return Qwen2_5_VLForConditionalGeneration.get_mrope_input_positions(model, [0] * length, shown)[0]


@pytest.mark.parametrize("seconds", [1.0, 0.5, 2.0, 0.3, 12.7])
def test_positions_of_a_video_are_those_of_vllm(seconds: float) -> None:
    """Pairs of frames are as far apart as their time says, and the text after the last of them continues there."""
    rounded = torch.tensor(seconds).item()
    video, image = frames(3, 2, 4, step=rounded * 2), ModelImage("d", (1, 4, 6), 2, ((1.0, 0.0),) * 3, no_pixels)
    starts = [3, 3 + 24 + 2]
    placed = [PlacedImage(video, starts[0]), PlacedImage(image, starts[1])]
    found = positions_of(40, placed)
    assert torch.equal(found, vllm_positions(seconds, video, image, starts, 40))
    with torch.device("meta"):
        model = Qwen2_5_VLModel(Qwen2_5_VLConfig(text_config={"num_hidden_layers": 1}, vision_config={"depth": 1}))
    model.config.vision_config.tokens_per_second = 2
    types = torch.zeros(1, 40, dtype=torch.long)
    types[0, 3:27], types[0, 29:35] = 2, 1
    theirs, _ = model.get_rope_index(
        torch.zeros_like(types), mm_token_type_ids=types, image_grid_thw=torch.tensor([image.grid]),
        video_grid_thw=torch.tensor([video.grid]), second_per_grid_ts=torch.tensor([seconds]),
    )  # fmt: skip
    assert torch.equal(found[:, :27], theirs[:, 0, :27])
    last = int(found[0, 3:27].max()) + 1 - 3
    assert int(found[0, 27] - theirs[0, 0, 27]) == max(0, last - 4)  # transformers leaves out time


def test_positions_of_pairs_with_their_times_are_those_of_vllm() -> None:
    pair = [START, *[VIDEO] * 6, END]
    tokens = [9, START, 9, 9, *pair, 9, 9, 9, *pair, END, 9, 9]
    vision = SimpleNamespace(spatial_merge_size=2)
    config = SimpleNamespace(
        video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END, vision_config=vision
    )
    expected, _ = Qwen3VLForConditionalGeneration._get_mrope_input_positions(
        tokens, [feature("video", 2, (2, 4, 6))], config
    )
    placed = [PlacedImage(frames(1, 2, 3), start) for start in (5, 16)]
    assert torch.equal(positions_of(len(tokens), placed), expected)


def test_an_omni_model_places_pairs_two_seconds_apart() -> None:
    """vLLM reads second_per_grid_ts, and the processor of transformers returns video_second_per_grid."""
    omni, video = Qwen3OmniMoeThinkerForConditionalGeneration, frames(3, 2, 4, step=2.0 * 13)
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2), position_id_per_seconds=13)
    model = SimpleNamespace(config=config, _get_audio_for_video_mapping=lambda _: ({}, set()))
    model.iter_mm_features = partial(omni.iter_mm_features, model)
    expected, _ = omni.get_mrope_input_positions(model, [0] * 40, [feature("video", 3, video.grid)])
    assert torch.equal(positions_of(40, [PlacedImage(video, 3)]), expected)
    assert "video_second_per_grid" in inspect.getsource(Qwen3OmniMoeProcessor)
    assert "second_per_grid_ts" not in inspect.getsource(Qwen3OmniMoeProcessor)


def test_this_vllm_knows_times_and_keeps_marks() -> None:
    """A vLLM without the one gets no videos of a Qwen2.5-VL, and one without the other a text with more marks."""
    processors = [type(name, (), {})() for name in ("Qwen3VLProcessor", "Qwen2_5_VLProcessor")]
    assert knows_times_of_frames("qwen2_5_vl") and not any(map(drops_marks_of_videos, processors))
    source = inspect.getsource(Qwen2_5_VLProcessingInfo.get_data_parser)
    assert "video_needs_metadata=True" in source
