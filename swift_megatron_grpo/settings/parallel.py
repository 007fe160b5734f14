"""The flags of the parallel layout, and whether the model can be divided by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from swift_megatron_grpo.settings.facts import ModelShape
from swift_megatron_grpo.settings.flag import AtLeast, Faults, Flags, rule
from swift_megatron_grpo.settings.layout import Layout, parse_stages

_SIZE = AtLeast(1, use=1)


@dataclass(frozen=True, kw_only=True)
class Parallel(Flags):
    """The layout of training, and the size of a vLLM in the training processes."""

    tensor_model_parallel_size: Annotated[int, _SIZE]
    pipeline_model_parallel_size: Annotated[int, _SIZE]
    context_parallel_size: Annotated[int, _SIZE]
    expert_model_parallel_size: Annotated[int, _SIZE]
    expert_tensor_parallel_size: Annotated[int, _SIZE]
    virtual_pipeline_model_parallel_size: Annotated[int | None, AtLeast(1, use=2)]
    microbatch_group_size_per_vp_stage: int | None
    sequence_parallel: bool
    decoder_first_pipeline_num_layers: int | None
    decoder_last_pipeline_num_layers: int | None
    pipeline_model_parallel_layout: str | None
    account_for_embedding_in_pipeline_split: bool
    account_for_loss_in_pipeline_split: bool
    overlap_p2p_comm: bool
    moe_pad_expert_input_to_capacity: bool
    micro_batch_size: int
    global_batch_size: int
    max_tokens_per_micro_batch: int | None
    vllm_mode: str | None
    vllm_tensor_parallel_size: Annotated[int, _SIZE]

    def layout(self, world_size: int) -> Layout:
        stages = self.pipeline_model_parallel_layout
        virtual = self.virtual_pipeline_model_parallel_size or 1
        if stages is not None:
            virtual = max(1, len(parse_stages(stages)) // max(1, self.pipeline_model_parallel_size))
        return Layout(
            world_size=world_size,
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            context_parallel_size=self.context_parallel_size,
            expert_model_parallel_size=self.expert_model_parallel_size,
            expert_tensor_parallel_size=self.expert_tensor_parallel_size,
            virtual_pipeline_model_parallel_size=virtual,
            microbatch_group_size_per_vp_stage=self.microbatch_group_size_per_vp_stage,
            sequence_parallel=self.sequence_parallel,
            vllm_tensor_parallel_size=1 if self.vllm_mode == "server" else self.vllm_tensor_parallel_size,
            first_stage_layers=self.decoder_first_pipeline_num_layers,
            last_stage_layers=self.decoder_last_pipeline_num_layers,
            stages=stages,
            extra_layers=self.account_for_embedding_in_pipeline_split + self.account_for_loss_in_pipeline_split,
        )

    @rule
    def the_model_can_be_divided(self, layout: Layout, shape: ModelShape) -> Faults:
        yield from faults_of_layout(layout, shape)

    @rule
    def virtual_stages_have_micro_batches(self, layout: Layout) -> Faults:
        sizes = self.micro_batch_size * layout.data_parallel if layout.is_positive else 0
        by_tokens = self.max_tokens_per_micro_batch is not None
        if sizes > 0 and (by_tokens or self.global_batch_size % sizes == 0):  # Batches reports other sizes
            yield from faults_of_interleaving(layout, None if by_tokens else self.global_batch_size // sizes)

    @rule
    def messages_of_virtual_stages_are_not_batched(self, layout: Layout) -> Faults:
        """Refuse several messages between two stages in one batch, which mixes them up, as Megatron-LM does."""
        stages, virtual = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
        if stages == 2 and virtual > 1 and not self.overlap_p2p_comm:
            yield (
                "--overlap_p2p_comm false with two pipeline stages and --virtual_pipeline_model_parallel_size "
                f"{virtual} sends several messages between them at once, which mixes them up; use --overlap_p2p_comm "
                "true"
            )

    @rule
    def experts_have_inputs_of_any_length(self) -> Faults:
        if self.moe_pad_expert_input_to_capacity and self.expert_model_parallel_size > 1:
            yield (
                "--moe_pad_expert_input_to_capacity true: with --expert_model_parallel_size above 1, ranks exchange "
                "parts of one size, and their micro batches differ in length; leave it out"
            )


# ---- the model


def faults_of_layout(layout: Layout, model: ModelShape) -> Faults:
    """Yield why the model cannot be divided by this layout, with sizes that can divide it."""
    if not layout.is_positive:
        return
    yield from _tensor_parallel_faults(layout, model)
    yield from _pipeline_faults(layout, model)
    yield from _expert_faults(layout, model)
    yield from _context_parallel_faults(layout, model)
    yield from _vllm_faults(layout, model)


def _tensor_parallel_faults(layout: Layout, model: ModelShape) -> Faults:
    """Yield what megatron-core 0.16 refuses."""
    flag, tp = "tensor_model_parallel_size", layout.tensor_model_parallel_size
    problem = _tensor_parallel_problem(tp, model)
    if problem:
        valid = _valid_sizes(layout, flag, lambda size: not _tensor_parallel_problem(size, model))
        yield f"{flag} ({tp}) {problem} of {model.name}{_advice(flag, valid)}"


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


def _pipeline_faults(layout: Layout, model: ModelShape) -> Faults:
    if layout.stages is not None:
        yield from _stage_faults(layout, model)
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
        yield (
            f"pipeline_model_parallel_size ({stages}) must divide the {layers} layers of {model.name}, minus those "
            "that --decoder_first_pipeline_num_layers and --decoder_last_pipeline_num_layers assign to the end stages, "
            f"plus those that the --account_for_... flags add{_advice(flag, valid)}, or {others}"
        )
    elif virtual > 1 and stages == 1:
        yield (
            f"virtual_pipeline_model_parallel_size ({virtual}) subdivides the stages of a pipeline, and "
            "pipeline_model_parallel_size is 1; use --pipeline_model_parallel_size 2, or leave it out"
        )
    elif any(size % virtual for size in stage_layers):
        valid = [v for v in range(1, max(stage_layers) + 1) if not any(size % v for size in stage_layers)]
        yield (
            f"virtual_pipeline_model_parallel_size ({virtual}) must divide the layers of every pipeline stage "
            f"({' and '.join(map(str, sorted(stage_layers)))} of the {layers} of {model.name})"
            f"{_advice('virtual_pipeline_model_parallel_size', valid)}"
        )


def _stage_faults(layout: Layout, model: ModelShape) -> Faults:
    """Yield why the stages of --pipeline_model_parallel_layout do not hold the whole model."""
    assert layout.stages is not None
    typed, layers = f"--pipeline_model_parallel_layout {layout.stages}", model.layers
    if (layout.first_stage_layers, layout.last_stage_layers, layout.extra_layers) != (None, None, 0):
        yield (
            f"{typed} assigns every layer, so the flags --decoder_first_pipeline_num_layers, "
            "--decoder_last_pipeline_num_layers and --account_for_... have nothing to assign; leave them out"
        )
        return
    stages = parse_stages(layout.stages)
    parts = "".join(stages)
    problem = None
    if set(parts) - set("EtL"):
        problem = f"has parts other than E, t and L: {' '.join(sorted(set(parts) - set('EtL')))}"
    elif not (stages[0].startswith("E") and stages[-1].endswith("L") and parts.count("E") == parts.count("L") == 1):
        problem = "must begin with E, the embedding, and end with L, the output layer"
    elif layers is not None and parts.count("t") != layers:
        problem = f"has {parts.count('t')} layers (t), and {model.name} has {layers}"
    elif len(stages) % layout.pipeline_model_parallel_size:
        size = layout.pipeline_model_parallel_size
        problem = f"has {len(stages)} stages, which must be a multiple of pipeline_model_parallel_size ({size})"
    if problem is not None:
        example = "Et*3|t*5L" if layers is None or layers < 2 else f"Et*{layers // 2}|t*{layers - layers // 2}L"
        yield (
            f"{typed}: it {problem}; use --pipeline_model_parallel_layout '{example}' with "
            "--pipeline_model_parallel_size 2, or leave it out for equal stages"
        )


def _context_parallel_faults(layout: Layout, model: ModelShape) -> Faults:
    """Yield heads of linear attention that TP * CP does not divide: context-parallel ranks exchange heads."""
    tp, cp = layout.tensor_model_parallel_size, layout.context_parallel_size

    def fits(size: int) -> bool:
        return all(heads % (tp * size) == 0 for heads in model.linear_heads)

    if cp > 1 and not fits(cp):
        yield (
            f"context_parallel_size ({cp}) * tensor_model_parallel_size ({tp}) must divide the linear attention heads "
            f"({' and '.join(map(str, model.linear_heads))}) of {model.name}"
            f"{_advice('context_parallel_size', _valid_sizes(layout, 'context_parallel_size', fits))}"
        )


def _expert_faults(layout: Layout, model: ModelShape) -> Faults:
    ep, etp = layout.expert_model_parallel_size, layout.expert_tensor_parallel_size
    pp, world = layout.pipeline_model_parallel_size, layout.world_size
    if model.experts is None:  # if they divide the ranks, Megatron creates process groups that nothing uses
        for flag, size in _expert_sizes(layout):
            if size > 1 and world % (ep * etp * pp):
                yield f"{flag} ({size}) needs experts, and {model.name} has none; use --{flag} 1"
        return
    valid = [n for n in range(1, model.experts + 1) if model.experts % n == 0 and world % (n * etp * pp) == 0]
    if ep not in valid:
        yield (
            f"expert_model_parallel_size ({ep}) must divide the {model.experts} experts of {model.name}, and its "
            f"product with expert_tensor_parallel_size ({etp}) and pipeline_model_parallel_size ({pp}) must divide the "
            f"world size ({world}){_advice('expert_model_parallel_size', valid)}"
        )
    elif model.expert_ffn is not None and model.expert_ffn % etp:
        yield (
            f"expert_tensor_parallel_size ({etp}) must divide moe_intermediate_size ({model.expert_ffn}) of "
            f"{model.name}; use --expert_tensor_parallel_size 1"
        )
    elif layout.tensor_model_parallel_size > 1 and not layout.sequence_parallel:
        yield (
            f"tensor_model_parallel_size ({layout.tensor_model_parallel_size}) with experts needs sequence parallelism"
            "; use --sequence_parallel true"
        )


def _expert_sizes(layout: Layout) -> list[tuple[str, int]]:
    return [(flag, getattr(layout, flag)) for flag in ("expert_model_parallel_size", "expert_tensor_parallel_size")]


def expert_size_notes(layout: Layout, model: ModelShape) -> list[str]:
    """Return a note on expert parallelism of a model without experts."""
    given = [f"--{flag} {size}" for flag, size in _expert_sizes(layout) if size > 1]
    if model.experts is not None or not given:
        return []
    return [f"{' '.join(given)}: without effect, because {model.name} has no experts"]


def _vllm_faults(layout: Layout, model: ModelShape) -> Faults:
    def divides_heads(size: int) -> bool:
        heads, kv_heads = model.attention_heads or size, model.kv_heads or size
        if any(linear_heads % size for linear_heads in model.linear_heads):
            return False
        return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    sizes = range(1, layout.world_size + 1)
    valid = [size for size in sizes if layout.world_size % size == 0 and divides_heads(size)]
    if layout.vllm_tensor_parallel_size not in valid:
        linear = ", ".join(map(str, model.linear_heads))
        yield (
            f"vllm_tensor_parallel_size ({layout.vllm_tensor_parallel_size}) must divide world size "
            f"({layout.world_size}), num_attention_heads ({model.attention_heads}) and num_key_value_heads "
            f"({model.kv_heads}, or be a multiple of it)"
            f"{f' and the linear attention heads ({linear})' if linear else ''} of {model.name}"
            f"{_advice('vllm_tensor_parallel_size', valid)}"
        )


def _valid_sizes(layout: Layout, flag: str, fits_model: Callable[[int], bool]) -> list[int]:
    """Return the values of a flag that fit the model and divide the world size, with the other flags unchanged."""
    flags = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    rest = math.prod(getattr(layout, other) for other in flags if other != flag)
    return [n for n in range(1, layout.world_size + 1) if layout.world_size % (n * rest) == 0 and fits_model(n)]


def _advice(flag: str, valid: Sequence[int]) -> str:
    return f"; use --{flag} {' or '.join(map(str, valid))}" if valid else ""


# ---- the schedule of a virtual pipeline


def faults_of_interleaving(layout: Layout, micro_batches: int | None) -> Faults:
    """Yield why the schedule cannot work.

    `micro_batches`: their number in one optimizer step on each data-parallel rank; None: a token budget sets it.
    """
    stages, group = layout.pipeline_model_parallel_size, layout.microbatch_group_size_per_vp_stage
    virtual = layout.virtual_pipeline_model_parallel_size
    size = group or stages
    if virtual == 1:
        if group is not None:
            yield (
                f"--microbatch_group_size_per_vp_stage {group} has no effect without "
                "--virtual_pipeline_model_parallel_size; leave it out or set both"
            )
    elif group is not None and group < stages:
        yield (
            f"microbatch_group_size_per_vp_stage ({group}) must be at least pipeline_model_parallel_size ({stages}); "
            f"use --microbatch_group_size_per_vp_stage {stages}, or leave it out"
        )
    elif micro_batches is not None and (micro_batches < size or 0 < micro_batches % size < stages):
        yield (
            f"virtual_pipeline_model_parallel_size ({virtual}) needs micro batches in groups of {size}, and "
            f"global_batch_size / micro_batch_size / data parallel size is {micro_batches}; make it a multiple of "
            f"{size} with --global_batch_size or --micro_batch_size, or use --max_tokens_per_micro_batch"
        )
