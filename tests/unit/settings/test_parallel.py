"""Layouts must divide the model; and checks of single flags, on plain values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.arguments.derived import shape_of
from swift_megatron_grpo.arguments.environment import (
    check_model_path,
    check_reference_adapter,
    check_reward_functions,
)
from swift_megatron_grpo.generation.protocol.model_identity import read_model_config
from swift_megatron_grpo.settings.adapter import Adapter
from swift_megatron_grpo.settings.layout import Facts, Layout, ModelShape, parse_stages
from swift_megatron_grpo.settings.parallel import Parallel, expert_size_notes, faults_of_interleaving, faults_of_layout
from tests.unit.settings.flags import faults, of


def shape(**changes: Any) -> ModelShape:
    plain = {"name": "m", "attention_heads": 16, "kv_heads": 4, "ffn": 96, "layers": 10, "experts": 8, "expert_ffn": 24}
    return ModelShape(**plain | changes)


def layout(world_size: int = 16, **changes: Any) -> Layout:
    return Layout(world_size, **{"sequence_parallel": True} | changes)


def check_layout(sizes: Layout, model: ModelShape) -> None:
    faults = list(faults_of_layout(sizes, model))
    if faults:
        raise ValueError("\n".join(faults))


def test_tensor_parallel_sizes_that_megatron_core_accepts() -> None:
    """transformer_config.py: num_query_groups must be a multiple or divisor of tensor_model_parallel_size."""
    for tp in (1, 2, 4, 8, 16):
        check_layout(layout(tensor_model_parallel_size=tp), shape())
    with pytest.raises(
        ValueError, match=r"num_key_value_heads \(4\) of m; use --tensor_model_parallel_size 1 or 2 or 4"
    ):
        check_layout(layout(12, tensor_model_parallel_size=6), shape(attention_heads=12, experts=None))
    with pytest.raises(ValueError, match=r"must divide intermediate_size \(100\)"):
        check_layout(layout(tensor_model_parallel_size=8), shape(ffn=100))
    with pytest.raises(ValueError, match=r"must divide the linear attention heads \(2\)"):
        check_layout(layout(tensor_model_parallel_size=4), shape(linear_heads=(2, 8)))


def test_context_parallel_ranks_and_vllm_divide_linear_attention_heads() -> None:
    check_layout(layout(tensor_model_parallel_size=2, context_parallel_size=2), shape(linear_heads=(4, 8)))
    with pytest.raises(
        ValueError, match=r"context_parallel_size \(4\) \* tensor_model_parallel_size \(2\) must divide the linear "
        r"attention heads \(4 and 8\) of m; use --context_parallel_size 1 or 2",
    ):  # fmt: skip
        check_layout(layout(tensor_model_parallel_size=2, context_parallel_size=4), shape(linear_heads=(4, 8)))
    with pytest.raises(
        ValueError, match=r"vllm_tensor_parallel_size \(4\) must .* and the linear attention heads \(2, 8\)"
    ):
        check_layout(layout(vllm_tensor_parallel_size=4), shape(linear_heads=(2, 8)))


@pytest.mark.parametrize(
    ("flags", "fits"),
    [
        ({"pipeline_model_parallel_size": 2}, True),
        ({"pipeline_model_parallel_size": 4}, False),
        ({"pipeline_model_parallel_size": 4, "first_stage_layers": 1}, True),
        ({"pipeline_model_parallel_size": 4, "first_stage_layers": 1, "last_stage_layers": 2}, False),
        ({"pipeline_model_parallel_size": 4, "first_stage_layers": 2, "last_stage_layers": 2}, True),
        ({"pipeline_model_parallel_size": 2, "first_stage_layers": 4, "last_stage_layers": 6}, True),
        ({"pipeline_model_parallel_size": 2, "first_stage_layers": 4, "last_stage_layers": 4}, False),
        ({"pipeline_model_parallel_size": 4, "extra_layers": 2}, True),
    ],
)
def test_layers_must_divide_over_the_pipeline_stages(flags: dict[str, int], fits: bool) -> None:
    if fits:
        check_layout(layout(**flags), shape())
    else:
        with pytest.raises(ValueError, match="pipeline_model_parallel_size"):
            check_layout(layout(**flags), shape())


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        ("Et*4|t*6L", None),
        ("Et|(tt|)*2tttt|tL", None),  # five stages: refused below with two ranks
        ("Et*4|t*5L", "has 9 layers (t), and m has 10; use --pipeline_model_parallel_layout 'Et*5|t*5L' with"),
        ("t*4|Et*6L", "must begin with E, the embedding, and end with L"),
        ("Et*4|t*6mL", "has parts other than E, t and L: m"),
        ("Et*4|t*5|tL", "has 3 stages, which must be a multiple of pipeline_model_parallel_size (2)"),
    ],
)
def test_stages_of_a_pipeline_hold_the_whole_model(stages: str, problem: str | None) -> None:
    ranks = 5 if "(" in stages else 2
    sizes = layout(10 * ranks, pipeline_model_parallel_size=ranks, stages=stages)
    if problem is None:
        check_layout(sizes, shape(experts=None))
    else:
        with pytest.raises(ValueError, match=re.escape(problem)):
            check_layout(sizes, shape(experts=None))


def test_stages_are_assigned_by_one_flag_only() -> None:
    sizes = layout(pipeline_model_parallel_size=2, stages="Et*5|t*5L", first_stage_layers=5)
    with pytest.raises(ValueError, match=r"--decoder_first_pipeline_num_layers, .* leave them out"):
        check_layout(sizes, shape())


def test_stages_are_parsed_as_megatron_parses_them() -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout as Megatrons

    for stages in ("Et*3|(tt|)*4,t|L", "E|t|tt|tL", "E,t*2|(t|t)*2|L"):
        assert len(parse_stages(stages)) == Megatrons.get_num_stages_from_str(stages)
        assert "".join(parse_stages(stages)).count("t") == sum(
            str(part) == "LayerType.decoder" for stage in Megatrons.parse_str_to_list(stages) for part in stage
        )


def test_experts_are_divided_evenly_and_need_sequence_parallelism() -> None:
    check_layout(layout(expert_model_parallel_size=4, expert_tensor_parallel_size=2), shape())
    with pytest.raises(ValueError, match="use --expert_model_parallel_size 1 or 2 or 4 or 8"):
        check_layout(layout(expert_model_parallel_size=3), shape())
    with pytest.raises(ValueError, match=r"use --expert_model_parallel_size 1 or 2$"):
        check_layout(layout(expert_model_parallel_size=8, expert_tensor_parallel_size=8), shape())
    with pytest.raises(ValueError, match="use --expert_tensor_parallel_size 1"):
        check_layout(layout(expert_tensor_parallel_size=16), shape())
    with pytest.raises(ValueError, match="use --sequence_parallel true"):
        check_layout(layout(tensor_model_parallel_size=2, sequence_parallel=False), shape())


def test_sizes_missing_in_a_config_are_not_checked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    unknown = shape_of(read_model_config(tmp_path), str(tmp_path))
    assert unknown == ModelShape(str(tmp_path), None, None, None, None, None, None)
    check_layout(layout(tensor_model_parallel_size=16), unknown)


def test_the_shape_of_composed_latent_and_sparse_models(tmp_path: Path) -> None:
    text = {"num_attention_heads": 8, "num_key_value_heads": 8, "kv_lora_rank": 16, "n_routed_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text, "num_hidden_layers": 6}))
    model = shape_of(read_model_config(tmp_path), str(tmp_path))
    assert (model.attention_heads, model.kv_heads, model.experts, model.layers) == (8, None, 4, 6)


@pytest.mark.parametrize("name", ["./models/qwen", "/models/qwen", "../qwen", "~/qwen", "a/b/c", "qwen3"])
def test_a_local_path_must_exist(name: str) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        check_model_path(name)


def test_hub_ids_are_accepted() -> None:
    check_model_path("Qwen/Qwen3-8B")
    check_model_path("gpt2", bare_ids=True)


def test_a_callable_reward_function_needs_no_registry() -> None:
    check_reward_functions([len], {})


def test_expert_parallelism_of_a_dense_model_is_noted() -> None:
    dense = shape(experts=None)
    sizes = layout(8, expert_model_parallel_size=4)
    check_layout(sizes, dense)
    assert expert_size_notes(sizes, dense) == [
        "--expert_model_parallel_size 4: without effect, because m has no experts"
    ]
    assert expert_size_notes(sizes, shape()) == expert_size_notes(layout(8), dense) == []
    with pytest.raises(ValueError, match=r"\(3\) needs experts, and m has none; use --expert_model_parallel_size 1"):
        check_layout(layout(8, expert_model_parallel_size=3), dense)  # Megatron could not create its groups


@pytest.mark.parametrize("parts", [["text_config"], ["thinker_config", "text_config"]])
def test_the_shape_of_a_composed_model_is_that_of_its_language_model(parts: list[str], tmp_path: Path) -> None:
    """Qwen3-Omni nests it in its thinker, and was said to have no experts."""
    config: dict[str, Any] = {"num_hidden_layers": 4, "num_experts": 8, "num_attention_heads": 16}
    for part in reversed(parts):
        config = {part: config, "num_hidden_layers": 99, "model_type": part}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = shape_of(read_model_config(tmp_path), str(tmp_path))
    assert (model.layers, model.experts, model.attention_heads) == (4, 8, 16)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"virtual_pipeline_model_parallel_size": 3},
            r"divide the layers of every pipeline stage \(8 .* 1 or 2 or",
        ),
        (
            {"virtual_pipeline_model_parallel_size": 2, "first_stage_layers": 7, "last_stage_layers": 9},
            r"\(7 and 9 of the 16 of m\); use --virtual_pipeline_model_parallel_size 1$",
        ),
        (
            {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 1},
            "--pipeline_model_parallel_size 2, or leave it out",
        ),
    ],
)
def test_a_virtual_pipeline_must_divide_the_layers_of_every_stage(flags: dict[str, int], message: str) -> None:
    model = shape(layers=16)
    check_layout(layout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=4), model)
    with pytest.raises(ValueError, match=message):
        check_layout(layout(**{"pipeline_model_parallel_size": 2} | flags), model)


def interleaved(group: int | None = None, virtual: int = 2) -> Layout:
    return layout(
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=virtual,
        microbatch_group_size_per_vp_stage=group,
    )


@pytest.mark.parametrize("sizes", [(2, 2, True), (2, 1, False), (4, 2, False), (1, 1, False), (2, 3, False)])
def test_messages_of_virtual_stages_are_not_batched_between_two_stages(sizes: tuple[int, int, bool]) -> None:
    stages, virtual, overlap = sizes
    group = of(
        Parallel, pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=virtual,
        overlap_p2p_comm=overlap, max_tokens_per_micro_batch=1,
    )  # fmt: skip
    faults = "\n".join(group.faults(Facts(group.layout(stages))))
    assert ("use --overlap_p2p_comm true" in faults) == (sizes == (2, 3, False))


def test_a_virtual_pipeline_needs_groups_of_micro_batches() -> None:
    def faults_of(sizes: Layout, micro_batches: int | None) -> str:
        return "\n".join(faults_of_interleaving(sizes, micro_batches))

    assert [faults_of(interleaved(), number) for number in (4, 8, None)] == ["", "", ""]
    assert faults_of(interleaved(5), 9) == ""  # the remaining 4 still fill the pipeline
    assert faults_of(interleaved(virtual=1), 3) == ""
    for number in (2, 6):
        advice = "make it a multiple of 4 with --global_batch_size or --micro_batch_size"
        assert advice in faults_of(interleaved(), number)
    assert "use --microbatch_group_size_per_vp_stage 4, or leave it out" in faults_of(interleaved(3), 12)
    assert "has no effect without --virtual_pipeline_model_parallel_size" in faults_of(interleaved(4, virtual=1), 12)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tuner_type": "full"}, "--vllm_enable_lora true requires --tuner_type lora"),
        ({"lora_rank": 1024}, "up to rank 512, and --lora_rank is 1024"),
        ({"mcore_model": "m", "vllm_mode": "server"}, "to its --model, and the trainer applies it to --mcore_model m"),
        ({"sync_check": "full"}, "use --sync_check canary, or --vllm_enable_lora false"),
    ],
)
def test_flags_that_exclude_sending_only_the_adapter(flags: dict[str, Any], message: str) -> None:
    valid: dict[str, Any] = {"tuner_type": "lora", "vllm_enable_lora": True}
    assert faults(Adapter, **valid) == faults(Adapter, **{**flags, "vllm_enable_lora": False}) == ""
    assert message in faults(Adapter, **valid | flags)


def test_a_reference_adapter_has_the_settings_of_the_trained_one(tmp_path: Path) -> None:
    """ms-swift creates both with those of the trained one, so another alpha would be ignored."""
    trained = {"lora_rank": 8, "lora_alpha": 32, "use_rslora": False}
    saved = {"r": 8, "lora_alpha": 32, "use_rslora": False}
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(saved))
    check_reference_adapter([str(tmp_path)], trained, [])
    config.write_text(json.dumps(saved | {"lora_alpha": 16, "use_rslora": True}))
    with pytest.raises(ValueError, match="has --lora_alpha 16 --use_rslora true, and the trained one --lora_alpha 32 "):
        check_reference_adapter([str(tmp_path)], trained, [])
    with pytest.raises(ValueError, match=r"no adapter_config\.json is there; use a folder with a saved adapter"):
        check_reference_adapter([str(tmp_path / "none")], trained, [])
    with pytest.raises(ValueError, match="--ref_adapters a b: the reference has one adapter"):
        check_reference_adapter(["a", "b"], trained, [])
    with pytest.raises(ValueError, match="--ref_adapters with --modules_to_save output_layer"):
        check_reference_adapter([str(tmp_path)], trained, ["output_layer"])
