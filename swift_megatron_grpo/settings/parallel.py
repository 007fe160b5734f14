"""The flags of the parallel layout, and whether the model can be divided by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Annotated

from swift_megatron_grpo.settings.flag import AtLeast, Faults, Flags, rule
from swift_megatron_grpo.settings.layout import Layout, ModelShape, parse_stages

_SIZE = AtLeast(1, use=1)
Problem = Callable[[Layout, ModelShape], str | None]


class Parallel(Flags):
    """The layout of training, and the size of a vLLM in the training processes."""

    tensor_model_parallel_size: Annotated[int, _SIZE]
    pipeline_model_parallel_size: Annotated[int, _SIZE]
    context_parallel_size: Annotated[int, _SIZE]
    expert_model_parallel_size: Annotated[int, _SIZE]
    expert_tensor_parallel_size: Annotated[int, _SIZE]
    virtual_pipeline_model_parallel_size: Annotated[int | None, AtLeast(1, use=1)]
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
        of_layout = {field.name for field in fields(Layout)}
        layout = Layout(world_size, **{name: value for name, value in vars(self).items() if name in of_layout})
        return replace(
            layout,
            virtual_pipeline_model_parallel_size=virtual,
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
    if layout.is_positive:
        yield from _size_faults("tensor_model_parallel_size", _tensor_problem, layout, model)
        yield from _stage_faults(layout, model) if layout.stages is not None else _pipeline_faults(layout, model)
        yield from _expert_faults(layout, model)
        yield from _size_faults("context_parallel_size", _context_problem, layout, model)
        yield from _size_faults("vllm_tensor_parallel_size", _vllm_problem, layout, model)


def _size_faults(flag: str, problem_of: Problem, layout: Layout, model: ModelShape, others: str = "") -> Faults:
    """Yield the problem of a size, with its values that have none and divide the world size. `others`: more advice."""
    problem = problem_of(layout, model)
    if problem is not None:
        sizes = {size: replace(layout, **{flag: size}) for size in range(1, layout.world_size + 1)}  # type: ignore[arg-type]
        fitting = {size: other for size, other in sizes.items() if other.world_size % other.model_parallel == 0}
        valid = [size for size, other in fitting.items() if problem_of(other, model) is None]
        yield f"{flag} ({getattr(layout, flag)}) {problem}{_advice(flag, valid)}{others}"


def _advice(flag: str, valid: Sequence[int]) -> str:
    return f"; use --{flag} {' or '.join(map(str, valid))}" if valid else ""


def _tensor_problem(layout: Layout, model: ModelShape) -> str | None:
    """Return what megatron-core 0.16 refuses."""
    tp, kv_heads = layout.tensor_model_parallel_size, model.kv_heads
    linear = [("the linear attention heads", heads) for heads in model.linear_heads]
    sizes = [("num_attention_heads", model.attention_heads), *linear, ("intermediate_size", model.ffn)]
    for name, size in sizes:
        if size is not None and size % tp:
            return f"must divide {name} ({size}) of {model.name}"
    if kv_heads is not None and kv_heads % tp and tp % kv_heads:
        return f"must divide, or be a multiple of, num_key_value_heads ({kv_heads}) of {model.name}"
    return None


def _pipeline_faults(layout: Layout, model: ModelShape) -> Faults:
    stages, virtual = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    stage_layers = _stage_layers(layout, model)
    if stage_layers is None:
        given = layout.first_stage_layers is not None or layout.last_stage_layers is not None
        others = f", or {'leave the flags of the end stages out' if given else 'set these flags'}"
        yield from _size_faults("pipeline_model_parallel_size", _pipeline_problem, layout, model, others)
    elif virtual > 1 and stages == 1 and stage_layers:
        yield (
            f"virtual_pipeline_model_parallel_size ({virtual}) subdivides the stages of a pipeline, and "
            "pipeline_model_parallel_size is 1; use --pipeline_model_parallel_size 2, or leave it out"
        )
    elif any(size % virtual for size in stage_layers):
        valid = [v for v in range(1, max(stage_layers) + 1) if not any(size % v for size in stage_layers)]
        yield (
            f"virtual_pipeline_model_parallel_size ({virtual}) must divide the layers of every pipeline stage "
            f"({' and '.join(map(str, sorted(stage_layers)))} of the {model.layers} of {model.name})"
            f"{_advice('virtual_pipeline_model_parallel_size', valid)}"
        )


def _pipeline_problem(layout: Layout, model: ModelShape) -> str | None:
    if _stage_layers(layout, model) is not None:
        return None
    return (
        f"must divide the {model.layers} layers of {model.name}, minus those that --decoder_first_pipeline_num_layers "
        "and --decoder_last_pipeline_num_layers assign to the end stages, plus those that the --account_for_... flags "
        "add"
    )


def _stage_layers(layout: Layout, model: ModelShape) -> set[int] | None:
    """Return the layers per pipeline stage, each distinct number once; None: they cannot be split evenly."""
    if model.layers is None:
        return set()
    given = [size for size in (layout.first_stage_layers, layout.last_stage_layers) if size is not None]
    rest = model.layers + layout.extra_layers - sum(given)
    rest_stages = layout.pipeline_model_parallel_size - len(given)
    if rest <= 0 or rest_stages <= 0:
        return set(given) if rest == 0 and rest_stages == 0 else None
    return {*given, rest // rest_stages} if rest % rest_stages == 0 else None


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


def _context_problem(layout: Layout, model: ModelShape) -> str | None:
    """Return heads of linear attention that TP * CP does not divide: context-parallel ranks exchange heads."""
    tp, cp = layout.tensor_model_parallel_size, layout.context_parallel_size
    if cp == 1 or all(heads % (tp * cp) == 0 for heads in model.linear_heads):
        return None
    heads = " and ".join(map(str, model.linear_heads))
    return f"* tensor_model_parallel_size ({tp}) must divide the linear attention heads ({heads}) of {model.name}"


def _expert_faults(layout: Layout, model: ModelShape) -> Faults:
    etp, tp = layout.expert_tensor_parallel_size, layout.tensor_model_parallel_size
    if model.experts is None:
        if not _divides_ranks(layout):  # otherwise Megatron creates process groups that nothing uses
            for flag, size in _expert_sizes(layout):
                yield f"{flag} ({size}) needs experts, and {model.name} has none; use --{flag} 1"
        return
    yield from _size_faults("expert_model_parallel_size", _expert_problem, layout, model)
    if model.expert_ffn is not None and model.expert_ffn % etp:
        yield (
            f"expert_tensor_parallel_size ({etp}) must divide moe_intermediate_size ({model.expert_ffn}) of "
            f"{model.name}; use --expert_tensor_parallel_size 1"
        )
    if tp > 1 and not layout.sequence_parallel:
        yield f"tensor_model_parallel_size ({tp}) with experts needs sequence parallelism; use --sequence_parallel true"


def _expert_problem(layout: Layout, model: ModelShape) -> str | None:
    if model.experts is None or (model.experts % layout.expert_model_parallel_size == 0 and _divides_ranks(layout)):
        return None
    return (
        f"must divide the {model.experts} experts of {model.name}, and its product with expert_tensor_parallel_size "
        f"({layout.expert_tensor_parallel_size}) and pipeline_model_parallel_size "
        f"({layout.pipeline_model_parallel_size}) must divide the world size ({layout.world_size})"
    )


def _divides_ranks(layout: Layout) -> bool:
    sizes = layout.expert_model_parallel_size, layout.expert_tensor_parallel_size, layout.pipeline_model_parallel_size
    return layout.world_size % math.prod(sizes) == 0


def _expert_sizes(layout: Layout) -> list[tuple[str, int]]:
    flags = ("expert_model_parallel_size", "expert_tensor_parallel_size")
    return [(flag, getattr(layout, flag)) for flag in flags if getattr(layout, flag) > 1]


def expert_size_notes(layout: Layout, model: ModelShape) -> list[str]:
    """Return a note on expert parallelism of a model without experts."""
    given = " ".join(f"--{flag} {size}" for flag, size in _expert_sizes(layout))
    if model.experts is not None or not given:
        return []
    return [f"{given}: without effect, because {model.name} has no experts"]


def _vllm_problem(layout: Layout, model: ModelShape) -> str | None:
    size = layout.vllm_tensor_parallel_size
    heads, kv_heads = model.attention_heads or size, model.kv_heads or size
    divided = (layout.world_size, heads, *model.linear_heads)
    if not any(number % size for number in divided) and (kv_heads % size == 0 or size % kv_heads == 0):
        return None
    linear = ", ".join(map(str, model.linear_heads))
    return (
        f"must divide world size ({layout.world_size}), num_attention_heads ({model.attention_heads}) and "
        f"num_key_value_heads ({model.kv_heads}, or be a multiple of it)"
        f"{f' and the linear attention heads ({linear})' if linear else ''} of {model.name}"
    )


# ---- the schedule of a virtual pipeline


def faults_of_interleaving(layout: Layout, micro_batches: int | None) -> Faults:
    """Yield why the schedule cannot work. `micro_batches`: of a step and rank; None: a token budget sets them."""
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
