"""Images in a packed micro batch: their tokens, and positions as transformers computes them."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen3VLConfig, Qwen3VLModel

from swift_megatron_grpo.packing.collate import collate, count
from swift_megatron_grpo.packing.flops import FlopsModel, VisionTowerFlops
from swift_megatron_grpo.packing.images import pack_images, positions_of
from swift_megatron_grpo.packing.plan import Alignment, plan_by_tokens, zigzag_positions
from swift_megatron_grpo.packing.segments import lay_out
from swift_megatron_grpo.types import ModelImage, PlacedImage, Sample

CPU = torch.device("cpu")


def no_pixels() -> torch.Tensor:
    raise AssertionError("pixels are read by towers only")


def image(height: int, width: int) -> ModelImage:
    return ModelImage("d", (1, 2 * height, 2 * width), 2, ((1.0, 0.0),) * 3, no_pixels)


A, B = image(2, 3), image(4, 1)
CASES = [
    (9, ()),
    (12, (PlacedImage(A, 3),)),
    (14, (PlacedImage(A, 0), PlacedImage(B, 9))),
    (18, (PlacedImage(B, 2), PlacedImage(A, 7), PlacedImage(B, 14))),
]


@pytest.mark.parametrize(("length", "placed"), CASES)
@pytest.mark.parametrize("model", [(Qwen2_5_VLModel, Qwen2_5_VLConfig), (Qwen3VLModel, Qwen3VLConfig)])
def test_positions_are_those_of_transformers(model: tuple, length: int, placed: tuple[PlacedImage, ...]) -> None:  # type: ignore[type-arg]
    with torch.device("meta"):
        reference = model[0](model[1](text_config={"num_hidden_layers": 1}, vision_config={"depth": 1}))
    types = torch.zeros(1, length, dtype=torch.long)
    for place in placed:
        types[0, place.start : place.start + place.image.num_tokens] = 1
    separate = torch.tensor([p.image.grid for p in placed]) if placed else None
    expected, _ = reference.get_rope_index(torch.zeros_like(types), mm_token_type_ids=types, image_grid_thw=separate)
    assert torch.equal(positions_of(length, placed), expected[:, 0])


@pytest.mark.parametrize("cp", [1, 2])
def test_a_micro_batch_has_positions_on_three_axes_and_marks_image_tokens(cp: int) -> None:
    samples = [
        Sample(list(range(1, 13)), [False] * 10 + [True] * 2, 1.0, images=(PlacedImage(A, 3),)),
        Sample(list(range(1, 6)), [False] * 3 + [True] * 2, 1.0),
        Sample(list(range(1, 9)), [False] * 7 + [True], 1.0, images=(PlacedImage(A, 0),)),
    ]
    align = Alignment.of_layout(1, cp, False)
    parts = [collate(samples, range(3), count(samples), align, rank, cp, CPU).inputs for rank in range(cp)]
    lengths = [12, 8 if cp == 2 else 5, 8]
    whole = torch.cat([positions_of(n, s.images) for n, s in zip(lengths, samples, strict=True)], dim=1)
    for rank, part in enumerate(parts):
        assert torch.equal(part.position_ids, whole[:, None, zigzag_positions(lengths, rank, cp)])
        assert part.images is not None and part.images.shown == (A, A)
        assert part.images.mask.nonzero()[:, 1].tolist() == [*range(3, 9), *(sum(lengths[:2]) + i for i in range(6))]


def test_a_micro_batch_of_text_is_as_before() -> None:
    text = Sample([1], [False], 1.0)
    inputs = collate([Sample([1, 2, 3], [False, True, True], 1.0)], [0], count([]), Alignment(1, 1), 0, 1, CPU).inputs
    assert inputs.images is None and inputs.position_ids.tolist() == [[0, 1, 2]]
    assert pack_images([text], lay_out([text], Alignment(1, 4), False))[0] == ()


@pytest.mark.parametrize("window", [None, 4])
def test_flops_of_a_tower_are_those_of_its_products(window: int | None) -> None:
    """Counted layer by layer and patch by patch: two FLOPs per multiplication."""
    layers, full, hidden, ffn, patches = 3, 1 if window else 3, 8, 20, 12
    products = 0
    for layer in range(layers):
        for _ in range(patches):
            products += 4 * hidden * hidden + 2 * hidden * ffn  # q, k, v, output; up and down
            products += 2 * hidden * (patches if layer < full or window is None else window)  # scores and mix
    assert VisionTowerFlops(layers, full, hidden, ffn, window or 0).of_image(patches) == 2.0 * products


def test_ranks_share_the_work_of_images() -> None:
    """Four samples of equal length, two of them with an expensive image: each rank gets one of these."""
    plan = plan_by_tokens([8] * 4, 2, 8, FlopsModel(1, 0), Alignment(1, 1), image_work=[100.0, 100.0, 0.0, 0.0])
    ranks = [{sample for batch in rank for sample in batch} for rank in plan.assignment]
    assert all(len(rank & {0, 1}) == 1 for rank in ranks)
