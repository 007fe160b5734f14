"""Counts of parameters by rank: all ranks together hold the checkpoint, and each its layers."""

from __future__ import annotations

import pytest

from swift_megatron_grpo.cli.estimate.parameters import Part, adapters, held, stages_of, tensors_of
from swift_megatron_grpo.settings.layout import Layout, layers_of_stages

HIDDEN, FFN, VOCABULARY, LAYERS, EXPERTS = 8, 16, 32, 4, 4


def checkpoint(experts: bool = False, tower: bool = False) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "self_attn.q_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[prefix + "input_layernorm.weight"] = (HIDDEN,)
        if experts:
            shapes[prefix + "mlp.gate.weight"] = (EXPERTS, HIDDEN)
            shapes[prefix + "mlp.experts.down_proj"] = (EXPERTS, HIDDEN, FFN)
        else:
            shapes[prefix + "mlp.down_proj.weight"] = (HIDDEN, FFN)
    if tower:
        shapes["model.visual.blocks.0.attn.qkv.weight"] = (HIDDEN, HIDDEN)
    return shapes


def sizes(layout: Layout, experts: bool = False, tied: bool = False, tower: bool = False) -> list[float]:
    tensors = tensors_of(checkpoint(experts, tower))
    return [held(tensors, layout, stage, tied).total for stage in stages_of(layout, LAYERS)]


def test_one_rank_holds_the_checkpoint() -> None:
    layer = HIDDEN * HIDDEN + HIDDEN + HIDDEN * FFN
    assert sizes(Layout(1)) == [2 * VOCABULARY * HIDDEN + HIDDEN + LAYERS * layer]
    assert sizes(Layout(1), tied=True) == [VOCABULARY * HIDDEN + HIDDEN + LAYERS * layer]


def test_tensor_parallel_ranks_divide_matrices_and_copy_norms_and_routers() -> None:
    layer = (HIDDEN * HIDDEN + HIDDEN * FFN) / 2 + HIDDEN
    assert sizes(Layout(2, tensor_model_parallel_size=2)) == [VOCABULARY * HIDDEN + HIDDEN + LAYERS * layer]
    experts = EXPERTS * HIDDEN * FFN / 2 + EXPERTS * HIDDEN + HIDDEN * HIDDEN / 2 + HIDDEN
    layout = Layout(2, tensor_model_parallel_size=2, expert_model_parallel_size=2)
    assert sizes(layout, experts=True) == [VOCABULARY * HIDDEN + HIDDEN + LAYERS * experts]


def test_pipeline_stages_hold_the_model_once_and_a_tied_embedding_twice() -> None:
    layout = Layout(2, pipeline_model_parallel_size=2)
    assert sum(sizes(layout)) == sum(sizes(Layout(1)))
    assert sum(sizes(layout, tied=True)) == sum(sizes(Layout(1), tied=True)) + VOCABULARY * HIDDEN
    first, last = sizes(layout, tower=True)
    assert first == sizes(layout)[0] + HIDDEN * HIDDEN and last == sizes(layout)[1]


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        (Layout(2, pipeline_model_parallel_size=2), [2, 2]),
        (Layout(2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2), [1, 1, 1, 1]),
        (Layout(2, pipeline_model_parallel_size=2, first_stage_layers=1), [1, 3]),
        (Layout(2, pipeline_model_parallel_size=2, last_stage_layers=1), [3, 1]),
        (Layout(2, pipeline_model_parallel_size=2, stages="Et|tttL"), [1, 3]),
    ],
)
def test_the_layers_of_each_stage(layout: Layout, layers: list[int]) -> None:
    assert layers_of_stages(layout, LAYERS) == layers


def test_a_virtual_pipeline_gives_each_rank_layers_of_every_round() -> None:
    layout = Layout(2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    assert [sorted(stage.layers) for stage in stages_of(layout, LAYERS)] == [[0, 2], [1, 3]]


def test_adapters_have_two_matrices_for_each_adapted_one() -> None:
    tensors, [stage] = tensors_of(checkpoint()), stages_of(Layout(1), LAYERS)
    both = 2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + FFN)
    assert adapters(tensors, Layout(1), stage, 2, ()).total == LAYERS * both
    assert adapters(tensors, Layout(1), stage, 2, ("q_proj",)).total == LAYERS * 2 * (HIDDEN + HIDDEN)


def test_matrices_that_megatron_fuses_share_the_first_matrix_of_an_adapter() -> None:
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    tensors, [stage] = tensors_of(dict.fromkeys(names, (FFN, HIDDEN))), stages_of(Layout(1), LAYERS)
    assert adapters(tensors, Layout(1), stage, 2, ()).total == 2 * (HIDDEN + 3 * FFN)


def test_every_tensor_has_its_part() -> None:
    parts = {tensor.name.split(".")[-2]: tensor.part for tensor in tensors_of(checkpoint(tower=True))}
    assert (
        parts["embed_tokens"] is Part.EMBEDDING and parts["lm_head"] is Part.HEAD and parts["qkv"] is Part.VISION_TOWER
    )
    assert parts["q_proj"] is parts["norm"] is Part.LAYERS
