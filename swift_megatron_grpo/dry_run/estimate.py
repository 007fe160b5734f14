"""Estimate micro batches, memory and time of a step of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments
from swift_megatron_grpo.arguments.layout_checks import check_layout, read_model_shape
from swift_megatron_grpo.arguments.to_config import configure
from swift_megatron_grpo.config import GRPOConfig
from swift_megatron_grpo.dry_run.model import Model
from swift_megatron_grpo.dry_run.rows import Rows
from swift_megatron_grpo.layout import Layout
from swift_megatron_grpo.packing.bundles import Group, SampleWork, gain_of, plan_with_shared_prompts
from swift_megatron_grpo.packing.plan import Alignment, StepPlan, plan_by_count, plan_by_tokens, room_of
from swift_megatron_grpo.planning.activations import Recompute, Tokens
from swift_megatron_grpo.planning.advice import MARGIN, Change, Run, settings_that_fit
from swift_megatron_grpo.planning.gpus import Gpu
from swift_megatron_grpo.planning.memory import RankMemory, Training, Vllm, plan_memory
from swift_megatron_grpo.planning.throughput import (
    Generation,
    StepWork,
    seconds_of_generation,
    seconds_of_training,
    work_of,
)


@dataclass(frozen=True)
class Estimate:
    """The estimates of one step."""

    longest: int  # tokens of the longest sample that the flags allow
    plan: StepPlan
    largest: Tokens  # micro batch, if all completions have --max_completion_length
    memory: list[RankMemory]  # by pipeline stage
    fits: bool
    changes: list[Change]
    work: StepWork  # of a step whose completions have half of --max_completion_length
    train_seconds: float
    generation_seconds: float | None  # None: servers generate


def estimate(args: GRPOArguments, model: Model, rows: Rows, gpu: Gpu) -> Estimate:
    config = configure(args)
    prompts = _prompts_of_step(rows, config)
    samples = [(prompt + args.max_completion_length, args.max_completion_length) for prompt in prompts]
    plan, largest = _micro_batches(args, config, model, samples)
    run = Run(
        tensors=model.tensors,
        decoder=model.decoder,
        training=_training(args, config, largest, plan.num_micro_batches),
        vllm=None if config.server is not None else Vllm(config.vllm.gpu_memory_utilization, config.vllm.sleep_level),
        longest_sample=max(tokens for tokens, _ in samples),
    )
    memory = plan_memory(run.tensors, run.decoder, run.training, run.vllm, gpu.memory_bytes)
    fits = max(rank.peak for rank in memory) <= gpu.memory_bytes * (1 - MARGIN)
    half = [(prompt + args.max_completion_length // 2, args.max_completion_length // 2) for prompt in prompts]
    work = work_of(half, model.flops)
    saved = _saved_by_sharing(plan, samples, config, model)
    return Estimate(
        longest=run.longest_sample,
        plan=plan,
        largest=largest,
        memory=memory,
        fits=fits,
        changes=[] if fits else settings_that_fit(run, gpu.memory_bytes, _divides(args)),
        work=work,
        train_seconds=_train_seconds(args, config, run.training, model, gpu, work) * (1 - saved),
        generation_seconds=_generation_seconds(args, config, model, gpu, prompts),
    )


def _prompts_of_step(rows: Rows, config: GRPOConfig) -> list[int]:
    """Return the length of the prompt of every sample of a step; rows repeat if there are fewer."""
    needed = max(1, math.ceil(config.batch.global_batch_size / config.batch.num_generations))
    lengths = [rows.lengths[place % len(rows.lengths)] for place in range(needed)]
    return [length for length in lengths for _ in range(config.batch.num_generations)][: config.batch.global_batch_size]


# ---- micro batches


def _micro_batches(
    args: GRPOArguments, config: GRPOConfig, model: Model, samples: list[tuple[int, int]]
) -> tuple[StepPlan, Tokens]:
    layout, packing = config.batch.layout, config.packing
    lengths, completions = [tokens for tokens, _ in samples], [completion for _, completion in samples]
    align = Alignment.of_layout(
        layout.tensor_model_parallel_size, layout.context_parallel_size, layout.sequence_parallel
    )
    multiple = 1
    if layout.virtual_pipeline_model_parallel_size > 1:
        multiple = layout.microbatch_group_size_per_vp_stage or layout.pipeline_model_parallel_size
    work, groups = SampleWork(lengths, completions, None, model.flops), _groups(samples, config)
    shares = packing.share_prompts_from is not None and _can_share(layout, model)
    if packing.max_tokens is None:
        plan = plan_by_count(len(samples), layout.data_parallel, config.batch.micro_batch_size)
        if shares and groups and gain_of(plan, work, groups).gain >= (packing.share_prompts_from or 0) > 0:
            plan = replace(plan, share_prompts=True)
    else:
        plan = plan_by_tokens(
            lengths, layout.data_parallel, packing.max_tokens, model.flops, align, multiple, completions, None
        )
        if shares and groups:
            room = room_of(packing.max_tokens, align)
            shared = plan_with_shared_prompts(work, groups, layout.data_parallel, room, multiple)
            if shared.plan is not None and 0 < shared.gain >= (packing.share_prompts_from or 0):
                plan = shared.plan
    return plan, max((_tokens(batch, plan, samples, groups) for rank in plan.assignment for batch in rank),
                     key=lambda tokens: tokens.packed + tokens.keys)  # fmt: skip


def _groups(samples: list[tuple[int, int]], config: GRPOConfig) -> list[Group]:
    size = config.batch.num_generations
    if size < 2:
        return []
    starts = range(0, len(samples) - size + 1, size)
    return [Group(range(start, start + size), samples[start][0] - samples[start][1]) for start in starts]


def _can_share(layout: Layout, model: Model) -> bool:
    """Return True if completions can share a prompt: training/shared_prompts.py decides it in a run."""
    return layout.context_parallel_size == 1 and not model.decoder.delta_layers and not model.has_windows


def _tokens(batch: tuple[int, ...], plan: StepPlan, samples: list[tuple[int, int]], groups: list[Group]) -> Tokens:
    repeated, trained = sum(samples[i][0] for i in batch), sum(samples[i][1] for i in batch)
    if not plan.share_prompts:
        return Tokens(repeated, repeated, trained)
    prompts = {group.samples.start: group.shared for group in groups if set(group.samples) & set(batch)}
    return Tokens(trained + sum(prompts.values()), repeated, trained)


def _saved_by_sharing(plan: StepPlan, samples: list[tuple[int, int]], config: GRPOConfig, model: Model) -> float:
    if not plan.share_prompts:
        return 0.0
    lengths, completions = [tokens for tokens, _ in samples], [completion for _, completion in samples]
    return gain_of(plan, SampleWork(lengths, completions, None, model.flops), _groups(samples, config)).gain


# ---- memory


def _training(args: GRPOArguments, config: GRPOConfig, largest: Tokens, micro_batches: int) -> Training:
    modules = tuple(args.target_modules if isinstance(args.target_modules, list) else [args.target_modules])
    every_module = "all-linear" in modules
    item = args.torch_dtype.itemsize
    states = [args.exp_avg_dtype.itemsize, args.exp_avg_sq_dtype.itemsize] if args.optimizer == "adam" else [4]
    if args.torch_dtype.itemsize < 4 or args.use_distributed_optimizer:
        states.append(args.main_params_dtype.itemsize)
    return Training(
        layout=config.batch.layout,
        tokens=largest,
        micro_batches=micro_batches,
        recompute=Recompute(
            args.recompute_granularity,
            args.recompute_method,
            args.recompute_num_layers,
            tuple(args.recompute_modules or ()),
            args.recompute_elementwise,
        ),
        lora_rank=args.lora_rank if args.has_adapter else None,
        lora_modules=() if every_module else modules,
        trains_tower=args.is_multimodal and not args.freeze_vit,
        weight_bytes=item,
        optimizer_bytes=sum(states),
        shards_optimizer=bool(args.use_distributed_optimizer),
        optimizer_on_cpu=float(args.optimizer_offload_fraction) if args.optimizer_cpu_offload else 0.0,
        frozen_reference=config.reference.beta != 0 and config.reference.model_dir is not None,
        offload_model=args.offload_model,
        offload_optimizer=args.offload_optimizer,
        offload_grad=args.offload_grad,
    )


def _divides(args: GRPOArguments) -> Callable[[Layout], bool]:
    shape = read_model_shape(args.model_dir)

    def allows(layout: Layout) -> bool:
        try:
            check_layout(layout, shape)
        except ValueError:
            return False
        return bool(args.global_batch_size % layout.data_parallel == 0)

    return allows


# ---- time


def _train_seconds(
    args: GRPOArguments, config: GRPOConfig, training: Training, model: Model, gpu: Gpu, work: StepWork
) -> float:
    old = config.num_iterations > 1 or config.batch.steps_per_generation > 1
    reference = config.reference.beta != 0
    return seconds_of_training(
        work,
        gpu,
        config.batch.layout.world_size,
        recomputes=training.recompute.granularity == "full",
        trains_adapters=args.has_adapter,
        has_experts=bool(model.decoder.expert_layers),
        passes=old + reference,
    )


def _generation_seconds(
    args: GRPOArguments, config: GRPOConfig, model: Model, gpu: Gpu, prompts: list[int]
) -> float | None:
    """Return the seconds in which the training processes generate a rollout, for one optimizer step."""
    if config.server is not None:
        return None
    layout, decoder = config.batch.layout, model.decoder
    ranks = layout.vllm_tensor_parallel_size
    share = math.ceil(config.batch.generation_batch_size * ranks / layout.world_size)
    at_once = min(share, config.vllm.max_num_seqs)
    attending = decoder.layers - len(decoder.delta_layers)
    mean_prompt = sum(prompts) / len(prompts)
    seconds = seconds_of_generation(
        Generation(
            sequences=at_once,
            waves=share / at_once,
            steps=args.max_completion_length,
            weight_bytes=_weights_of_a_step(model, at_once) * args.torch_dtype.itemsize / ranks,
            cache_bytes_per_token=2 * decoder.keys * attending * args.torch_dtype.itemsize / ranks,
            mean_length=mean_prompt + args.max_completion_length / 4,
        ),
        gpu,
    )
    return seconds / config.batch.steps_per_generation


def _weights_of_a_step(model: Model, sequences: int) -> float:
    """Return the parameters that a step of so many sequences reads; of experts, those that some sequence takes."""
    experts = sum(tensor.size for tensor in model.tensors if ".experts." in tensor.name)
    if not experts:
        return model.parameters
    width = model.decoder.expert_ffn * model.decoder.hidden * 3 * len(model.decoder.expert_layers)
    number = max(1, round(experts / width))
    missed = (1 - model.decoder.experts_per_token / number) ** sequences
    return model.parameters - experts * missed
