"""Checks of the parallel layout against the shape of the model, which is read from its config.json.

Pure functions on plain values. Each raises a ValueError that names the fault, the flag, and a value that works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from swift_megatron_grpo.arguments.advice import use_flag
from swift_megatron_grpo.arguments.pipeline_stages import check_stages
from swift_megatron_grpo.arguments.problems import check_all
from swift_megatron_grpo.generation.protocol.model_identity import language_config, read_model_config
from swift_megatron_grpo.settings.facts import ModelShape
from swift_megatron_grpo.settings.layout import Layout

# ---- the model


def read_model_shape(folder: str | Path) -> ModelShape:
    return shape_of(read_model_config(folder), folder)


def shape_of(config: Mapping[str, Any], folder: str | Path) -> ModelShape:
    """Return the shape of a config.json as transformers writes it; of a composed model, of its text part."""
    text = language_config(config)

    def number(*keys: str) -> int | None:
        return next((text[key] for key in keys if isinstance(text.get(key), int)), None)

    latent = "kv_lora_rank" in text  # every rank holds the whole latent, and all heads are alike
    linear = [number("linear_num_key_heads"), number("linear_num_value_heads")]
    return ModelShape(
        name=str(folder),
        attention_heads=number("num_attention_heads"),
        kv_heads=None if latent else number("num_key_value_heads"),
        ffn=number("intermediate_size"),
        layers=number("num_hidden_layers"),
        experts=number("num_experts", "n_routed_experts", "moe_num_experts", "num_local_experts"),
        expert_ffn=number("moe_intermediate_size"),
        linear_heads=tuple(heads for heads in linear if heads is not None),
    )


# ---- the layout


def check_layout(layout: Layout, model: ModelShape) -> None:
    """Raise ValueError unless the model can be divided by this layout."""
    for flag in (field.name for field in fields(Layout) if field.name.endswith("_parallel_size")):
        if getattr(layout, flag) <= 0:
            raise ValueError(f"{flag} must be > 0, got {getattr(layout, flag)}; use --{flag} 1")
    check_all(
        [
            lambda: _check_tensor_parallel(layout, model),
            lambda: _check_pipeline(layout, model),
            lambda: _check_experts(layout, model),
            lambda: _check_context_parallel(layout, model),
            lambda: _check_vllm_tensor_parallel(layout, model),
        ]
    )


def _check_tensor_parallel(layout: Layout, model: ModelShape) -> None:
    """Check the divisibility that megatron-core 0.16 requires."""
    tp = layout.tensor_model_parallel_size
    problem = _tensor_parallel_problem(tp, model)
    if problem:
        flag = "tensor_model_parallel_size"
        valid = _valid_sizes(layout, flag, lambda size: not _tensor_parallel_problem(size, model))
        advice = _advice(flag, valid)
        raise ValueError(f"tensor_model_parallel_size ({tp}) {problem} of {model.name}{advice}")


def _tensor_parallel_problem(tp: int, model: ModelShape) -> str | None:
    if model.attention_heads is not None and model.attention_heads % tp:
        return f"must divide num_attention_heads ({model.attention_heads})"
    if model.kv_heads is not None and model.kv_heads % tp and tp % model.kv_heads:
        return f"must divide, or be a multiple of, num_key_value_heads ({model.kv_heads})"
    for heads in model.linear_heads:
        if heads % tp:
            return f"must divide the linear attention heads ({heads})"
    if model.ffn is not None and model.ffn % tp:
        return f"must divide intermediate_size ({model.ffn})"
    return None


def _check_pipeline(layout: Layout, model: ModelShape) -> None:
    if layout.stages is not None:
        if (layout.first_stage_layers, layout.last_stage_layers, layout.extra_layers) != (None, None, 0):
            raise ValueError(
                f"--pipeline_model_parallel_layout {layout.stages} assigns every layer, so the flags "
                "--decoder_first_pipeline_num_layers, --decoder_last_pipeline_num_layers and --account_for_..."
                " have nothing to assign; leave them out"
            )
        check_stages(layout.stages, layout.pipeline_model_parallel_size, model.layers, model.name)
        return
    if model.layers is None:
        return
    layers, stages = model.layers, layout.pipeline_model_parallel_size
    virtual = layout.virtual_pipeline_model_parallel_size
    given = [size for size in (layout.first_stage_layers, layout.last_stage_layers) if size is not None]

    def layers_of_stages(stages: int) -> set[int] | None:
        """Return the layers per pipeline stage, each distinct number once; None: they cannot be split evenly."""
        rest, rest_stages = layers + layout.extra_layers - sum(given), stages - len(given)
        if rest <= 0 or rest_stages <= 0:
            return set(given) if rest == 0 and rest_stages == 0 else None
        return {*given, rest // rest_stages} if rest % rest_stages == 0 else None

    stage_layers = layers_of_stages(stages)
    if stage_layers is None:
        flag = "pipeline_model_parallel_size"
        valid = _valid_sizes(layout, flag, lambda size: layers_of_stages(size) is not None)
        others = "leave the flags of the end stages out" if given else "set these flags"
        raise ValueError(
            f"pipeline_model_parallel_size ({stages}) must divide the {layers} layers of {model.name}, minus those "
            "that --decoder_first_pipeline_num_layers and --decoder_last_pipeline_num_layers assign to the end stages, "
            f"plus those that the --account_for_... flags add{_advice(flag, valid)}, or {others}"
        )
    if virtual > 1 and stages == 1:
        raise ValueError(
            f"virtual_pipeline_model_parallel_size ({virtual}) subdivides the stages of a pipeline, and "
            "pipeline_model_parallel_size is 1; use --pipeline_model_parallel_size 2, or leave it out"
        )
    if any(size % virtual for size in stage_layers):
        valid = [v for v in range(1, max(stage_layers) + 1) if not any(size % v for size in stage_layers)]
        raise ValueError(
            f"virtual_pipeline_model_parallel_size ({virtual}) must divide the layers of every pipeline stage "
            f"({' and '.join(map(str, sorted(stage_layers)))} of the {layers} of {model.name})"
            f"{_advice('virtual_pipeline_model_parallel_size', valid)}"
        )


def _check_context_parallel(layout: Layout, model: ModelShape) -> None:
    """Check that the heads of linear attention can be divided by TP * CP: context-parallel ranks exchange heads."""
    tp, cp = layout.tensor_model_parallel_size, layout.context_parallel_size

    def fits(size: int) -> bool:
        return all(heads % (tp * size) == 0 for heads in model.linear_heads)

    if cp > 1 and not fits(cp):
        raise ValueError(
            f"context_parallel_size ({cp}) * tensor_model_parallel_size ({tp}) must divide the linear attention heads "
            f"({' and '.join(map(str, model.linear_heads))}) of {model.name}"
            f"{_advice('context_parallel_size', _valid_sizes(layout, 'context_parallel_size', fits))}"
        )


def _check_experts(layout: Layout, model: ModelShape) -> None:
    ep, etp, pp = (
        layout.expert_model_parallel_size,
        layout.expert_tensor_parallel_size,
        layout.pipeline_model_parallel_size,
    )
    if model.experts is None:
        for flag, size in _expert_sizes(layout):
            if size > 1 and layout.world_size % (ep * etp * pp):
                raise ValueError(f"{flag} ({size}) needs experts, and {model.name} has none; use --{flag} 1")
        return  # otherwise Megatron creates process groups that nothing uses
    valid = [
        n for n in range(1, model.experts + 1) if model.experts % n == 0 and layout.world_size % (n * etp * pp) == 0
    ]
    if ep not in valid:
        raise ValueError(
            f"expert_model_parallel_size ({ep}) must divide the {model.experts} experts of {model.name}, and its "
            f"product with expert_tensor_parallel_size ({etp}) and pipeline_model_parallel_size ({pp}) must divide the "
            f"world size ({layout.world_size}){_advice('expert_model_parallel_size', valid)}"
        )
    if model.expert_ffn is not None and model.expert_ffn % etp:
        raise ValueError(
            f"expert_tensor_parallel_size ({etp}) must divide moe_intermediate_size ({model.expert_ffn}) of "
            f"{model.name}; use --expert_tensor_parallel_size 1"
        )
    if layout.tensor_model_parallel_size > 1 and not layout.sequence_parallel:
        raise ValueError(
            f"tensor_model_parallel_size ({layout.tensor_model_parallel_size}) with experts needs sequence parallelism"
            "; use --sequence_parallel true"
        )


def _expert_sizes(layout: Layout) -> list[tuple[str, int]]:
    flags = ("expert_model_parallel_size", "expert_tensor_parallel_size")
    return [(flag, getattr(layout, flag)) for flag in flags]


def expert_size_notes(layout: Layout, model: ModelShape) -> list[str]:
    """Return a note on expert parallelism of a model without experts."""
    given = [f"--{flag} {size}" for flag, size in _expert_sizes(layout) if size > 1]
    if model.experts is not None or not given:
        return []
    return [f"{' '.join(given)}: without effect, because {model.name} has no experts"]


def _check_vllm_tensor_parallel(layout: Layout, model: ModelShape) -> None:
    def divides_heads(size: int) -> bool:
        heads, kv_heads = model.attention_heads or size, model.kv_heads or size
        if any(linear_heads % size for linear_heads in model.linear_heads):
            return False
        return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    sizes = range(1, layout.world_size + 1)
    valid = [size for size in sizes if layout.world_size % size == 0 and divides_heads(size)]
    if layout.vllm_tensor_parallel_size not in valid:
        raise ValueError(
            f"vllm_tensor_parallel_size ({layout.vllm_tensor_parallel_size}) must divide world size "
            f"({layout.world_size}), num_attention_heads ({model.attention_heads}) and num_key_value_heads "
            f"({model.kv_heads}, or be a multiple of it){_linear_heads(model)} of {model.name}"
            f"{_advice('vllm_tensor_parallel_size', valid)}"
        )


def _linear_heads(model: ModelShape) -> str:
    """Return what a message about heads adds for linear attention."""
    return f" and the linear attention heads ({', '.join(map(str, model.linear_heads))})" if model.linear_heads else ""


def _valid_sizes(layout: Layout, flag: str, fits_model: Callable[[int], bool]) -> list[int]:
    """Return the values of a flag that fit the model and divide the world size, with the other flags unchanged."""
    flags = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    rest = math.prod(getattr(layout, other) for other in flags if other != flag)
    return [n for n in range(1, layout.world_size + 1) if layout.world_size % (n * rest) == 0 and fits_model(n)]


def _advice(flag: str, valid: Sequence[int]) -> str:
    return f"; {use_flag(flag, valid)}" if valid else ""


def check_batched_messages(layout: Layout, overlap_p2p_comm: bool) -> None:
    """Refuse several messages between the same two stages in one batch, which mixes them up. Megatron-LM refuses it."""
    stages, virtual = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    if stages == 2 and virtual > 1 and not overlap_p2p_comm:
        raise ValueError(
            "--overlap_p2p_comm false with two pipeline stages and --virtual_pipeline_model_parallel_size "
            f"{virtual} sends several messages between them at once, which mixes them up; use --overlap_p2p_comm true"
        )


def check_interleaving(layout: Layout, micro_batches: int | None) -> None:
    """Check the schedule of a virtual pipeline.

    `micro_batches`: their number in one optimizer step on each data-parallel rank; None: a token budget sets it.
    """
    stages, group = layout.pipeline_model_parallel_size, layout.microbatch_group_size_per_vp_stage
    if layout.virtual_pipeline_model_parallel_size == 1:
        if group is not None:
            raise ValueError(
                f"--microbatch_group_size_per_vp_stage {group} has no effect without "
                "--virtual_pipeline_model_parallel_size; leave it out or set both"
            )
        return
    if group is not None and group < stages:
        raise ValueError(
            f"microbatch_group_size_per_vp_stage ({group}) must be at least pipeline_model_parallel_size ({stages}); "
            f"use --microbatch_group_size_per_vp_stage {stages}, or leave it out"
        )
    size = group or stages
    if micro_batches is not None and (micro_batches < size or 0 < micro_batches % size < stages):
        raise ValueError(
            f"virtual_pipeline_model_parallel_size ({layout.virtual_pipeline_model_parallel_size}) needs micro batches "
            f"in groups of {size}, and global_batch_size / micro_batch_size / data parallel size is {micro_batches}; "
            f"make it a multiple of {size} with --global_batch_size or --micro_batch_size, or use "
            "--max_tokens_per_micro_batch"
        )
