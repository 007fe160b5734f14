"""Bytes that image parts keep, against what autograd saves in transformers' classes, and their weights by rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, InternVLModel

from swift_megatron_grpo.arguments.refused import OMNI
from swift_megatron_grpo.cli.check.model import vision_tower_of
from swift_megatron_grpo.cli.estimate.activations import (
    PATCHES,
    Decoder,
    MediaTokens,
    Recompute,
    Tokens,
    VisionTower,
    bytes_of_block,
    bytes_of_rows,
    bytes_of_vision_tower,
)
from swift_megatron_grpo.cli.estimate.memory import GRADIENT_BYTES, Training, plan_memory, with_budget
from swift_megatron_grpo.cli.estimate.parameters import tensors_of
from swift_megatron_grpo.settings.layout import Layout

SIDE = 16  # patches of the image
# A part of what GLM keeps does not depend on the size of the image.
SIDES = {"glm4v": 32}
ROWS = 512
SIZES: dict[str, Any] = {"depth": 4, "hidden_size": 256, "intermediate_size": 704, "num_heads": 4,
                         "out_hidden_size": ROWS}  # fmt: skip
VISIONS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 4, "embed_dim": 256, "mlp_ratio": 3, "num_heads": 4, "hidden_size": ROWS},
    "qwen2_5_vl": {**SIZES, "fullatt_block_indexes": [1, 3]},
    "qwen3_vl": {**SIZES, "deepstack_visual_indexes": [0, 2]},
    "qwen3_omni_moe": {**SIZES, "deepstack_visual_indexes": [0, 2]},
    "qwen3_5": {**SIZES, "deepstack_visual_indexes": []},
    "glm4v": {**SIZES, "image_size": 336},
    "internvl": {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_attention_heads": 4,
        "image_size": [14 * SIDE] * 2,
    },
}


def sizes_of(kind: str) -> VisionTower:
    tower = vision_tower_of(kind, VISIONS[kind], ROWS)
    assert tower is not None
    return tower


def saved_bytes(kind: str, checkpointing: bool, aligner_only: bool) -> int:
    """Return the bytes of all tensors that autograd keeps of a forward pass, weights aside."""
    text = {"num_hidden_layers": 1, **({"hidden_size": ROWS, "vocab_size": 8} if kind == "internvl" else {})}
    values = {"vision_config": VISIONS[kind], "text_config": text}
    if kind in OMNI:
        config = AutoConfig.for_model(kind, thinker_config=values).thinker_config
    else:
        config = AutoConfig.for_model(kind, **values)
    config.vision_config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    if kind == "internvl":
        visual = InternVLModel(config).to(torch.bfloat16).train()
    else:
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
            part = (model if kind in OMNI else model.model).visual
        visual = type(part)(config.vision_config).to(torch.bfloat16).train()
    if checkpointing:
        visual.gradient_checkpointing_enable()
    for name, parameter in visual.named_parameters():
        parameter.requires_grad_(not aligner_only or "merger" in name or "projector" in name)
    weights = {parameter.untyped_storage().data_ptr() for parameter in visual.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    side = SIDES.get(kind, SIDE)
    patches = torch.randn(side * side, sizes_of(kind).values, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if kind == "internvl":
            tile = patches.view(1, 3, 14 * SIDE, 14 * SIDE)
            output = visual.get_image_features(tile, vision_feature_layer=-1, vision_feature_select_strategy="default")
        else:
            output = visual(patches, grid_thw=torch.tensor([[1, side, side]]))
    assert output.pooler_output.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("kind", VISIONS)
@pytest.mark.parametrize(("checkpointing", "aligner_only"), [(False, False), (True, False), (False, True)])
def test_a_trained_tower_keeps_what_autograd_saves(kind: str, checkpointing: bool, aligner_only: bool) -> None:
    tokens = SIDES.get(kind, SIDE) ** 2 // PATCHES
    planned = bytes_of_vision_tower(sizes_of(kind), tokens, not aligner_only, True, checkpointing)
    assert planned == pytest.approx(saved_bytes(kind, checkpointing, aligner_only), rel=0.03)


def test_a_frozen_tower_keeps_rows_and_nothing_else() -> None:
    qwen3, qwen2_5 = sizes_of("qwen3_vl"), sizes_of("qwen2_5_vl")
    assert bytes_of_vision_tower(qwen3, 256, False, False, True) == 0
    images = MediaTokens(shown=800, distinct=100, of_rollout=1000)
    assert bytes_of_rows(qwen2_5, images, frozen=True) == 1000 * ROWS * 2
    # Qwen3-VL: rows for two layers more are kept, and added to these layers in every micro batch.
    assert bytes_of_rows(qwen3, images, frozen=True) == (1000 * 3 + 800 * 2) * ROWS * 2
    assert bytes_of_rows(qwen3, images, frozen=False) == 800 * 2 * ROWS * 2


DECODER = Decoder(layers=4, hidden=ROWS, queries=512, keys=128, ffn=1024, vocabulary=1000, tied=True)
TENSORS = tensors_of({
    "model.embed_tokens.weight": (1000, ROWS),
    **{f"model.layers.{layer}.mlp.down_proj.weight": (ROWS, 1024) for layer in range(4)},
    "visual.blocks.0.attn.qkv.weight": (768, 256),
    "visual.pos_embed.weight": (2304, 256),
    "visual.merger.mlp.0.weight": (1024, 1024),
})  # fmt: skip
VISION_TOWER, ALIGNER = 768 * 256 + 2304 * 256, 1024 * 1024
TRAINING = Training(Layout(2, pipeline_model_parallel_size=2), Tokens(4096, 4096, 1024), micro_batches=2,
                    images=MediaTokens(shown=2048, distinct=512, of_rollout=4096))  # fmt: skip


def test_parts_of_the_image_part_have_gradients_if_they_are_trained() -> None:
    def gradients(**changes: Any) -> list[float]:
        ranks = plan_memory(TENSORS, DECODER, replace(TRAINING, **changes), None, 1e12, sizes_of("qwen3_vl"))
        return [rank.gradients / GRADIENT_BYTES for rank in ranks]

    first, last = gradients()
    assert gradients(trains_vision_tower=True) == [first + VISION_TOWER, last]
    assert gradients(trains_aligner=True) == [first + ALIGNER, last]
    assert gradients(trains_language=False, trains_vision_tower=True, trains_aligner=True) == [
        VISION_TOWER + ALIGNER,
        0,
    ]
    # Adapters are on matrices: not on the embedding of positions.
    first, last = gradients(lora_rank=2)
    assert gradients(lora_rank=2, trains_vision_tower=True) == [first + 2 * (768 + 256), last]
    assert gradients(lora_rank=2, lora_modules=("o_proj",), trains_vision_tower=True) == [0, 0]


def test_only_the_first_stage_has_rows_and_activations_of_images() -> None:
    tower = sizes_of("qwen3_vl")

    def activations(with_tower: bool = True, **changes: Any) -> list[float]:
        chosen = tower if with_tower else None
        return [rank.activations for rank in plan_memory(TENSORS, DECODER, replace(TRAINING, **changes), None, 1e12,
                                                         chosen)]  # fmt: skip

    first, last = activations(with_tower=False)
    rows = bytes_of_rows(tower, TRAINING.images, frozen=True)
    assert activations() == [first + rows, last]
    kept = bytes_of_vision_tower(tower, 512, True, True, True)
    rows = bytes_of_rows(tower, TRAINING.images, frozen=False)
    both = activations(trains_vision_tower=True, trains_aligner=True)
    assert both == [pytest.approx(first + 2 * kept + rows), last]  # of two micro batches


def test_a_tower_alone_can_need_most_if_layers_keep_little() -> None:
    tower, full = sizes_of("qwen3_vl"), Recompute("full", "uniform", 1)
    training = replace(TRAINING, layout=Layout(1), recompute=full, tokens=Tokens(4096, 4096, 16),
                       images=MediaTokens(4000, 4000, 4000))  # fmt: skip
    [rank] = plan_memory(TENSORS, DECODER, training, None, 1e12, tower)
    [without] = plan_memory(TENSORS, DECODER, training, None, 1e12)
    assert rank.in_backward > without.in_backward
    assert rank.in_backward == bytes_of_block(tower, 4000) - 4 * ROWS * 4096 * 2  # inputs of the layers


def test_a_smaller_budget_shows_fewer_images_at_one_time() -> None:
    images = with_budget(TRAINING, 1024).images
    assert images == MediaTokens(shown=512, distinct=128, of_rollout=4096)


def test_positions_of_three_axes_and_norms_of_heads_are_kept() -> None:
    def kept(**changes: Any) -> float:
        decoder = replace(DECODER, **changes)
        training = replace(TRAINING, layout=Layout(1, tensor_model_parallel_size=1))
        [rank] = plan_memory(TENSORS, decoder, training, None, 1e12)
        return rank.activations / (4 * 4096 * 2)

    assert kept(rotary=128) - kept() == 4 * 128
    assert kept() - kept(normed_heads=False) == 512 + 128
