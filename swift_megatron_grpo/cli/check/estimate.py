"""Estimate micro batches, memory and time of a step of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments
from swift_megatron_grpo.arguments.to_config import configure
from swift_megatron_grpo.cli.check.micro_batches import fullest, image_tokens_of, micro_batches, saved_by_sharing
from swift_megatron_grpo.cli.check.model import Model
from swift_megatron_grpo.cli.check.rows import Rows
from swift_megatron_grpo.cli.estimate.activations import Recompute, Tokens
from swift_megatron_grpo.cli.estimate.advice import MARGIN, Change, Run, settings_that_fit
from swift_megatron_grpo.cli.estimate.engine import Engine, engines_that_fit
from swift_megatron_grpo.cli.estimate.memory import (
    PHASES,
    RankMemory,
    Training,
    Vllm,
    master_bytes,
    plan_memory,
    with_budget,
)
from swift_megatron_grpo.cli.estimate.stages import EvenStages, even_stages
from swift_megatron_grpo.cli.estimate.throughput import Generation, seconds_of_generation, seconds_of_training
from swift_megatron_grpo.cli.estimate.work import PassCounts, StepWork, work_of
from swift_megatron_grpo.packing.plan import StepPlan
from swift_megatron_grpo.runtime.gpus import Gpu
from swift_megatron_grpo.settings.config import GRPOConfig
from swift_megatron_grpo.settings.layout import Layout
from swift_megatron_grpo.settings.parallel import faults_of_layout


@dataclass(frozen=True)
class Estimate:
    """The estimates of one step."""

    longest: int  # tokens of the longest sample that the flags allow
    plan: StepPlan
    largest: Tokens  # micro batch, if all completions have --max_completion_length
    fullest: int  # tokens of the largest micro batch that completions of other lengths can make; memory is for it
    memory: list[RankMemory]  # by pipeline stage
    engine: Engine | None  # None: servers generate
    engine_fits: bool
    at_once: int  # sequences of full length that vLLM's cache holds on each engine
    fits: bool
    changes: list[Change]
    engine_changes: list[str]  # flags with which vLLM fits into its share
    work: StepWork  # of a step whose completions have half of --max_completion_length
    train_seconds: float
    even_stages: EvenStages | None  # None: nothing is gained
    generation_seconds: float | None  # None: servers generate


def estimate(args: GRPOArguments, model: Model, rows: Rows, gpu: Gpu) -> Estimate:
    config = configure(args)
    prompts = _of_step(rows.lengths, config)
    samples = [(prompt + args.max_completion_length, args.max_completion_length) for prompt in prompts]
    plan, largest = micro_batches(config.batch, config.micro_batches, model, samples)
    longest = max(tokens for tokens, _ in samples)
    packed = fullest(plan, largest, config.batch, config.micro_batches, samples)
    engine = _engine(args, config, model, longest)
    run = Run(
        tensors=model.tensors,
        decoder=model.decoder,
        training=_filled(_training(args, config, largest, plan, rows), packed),
        vllm=None if engine is None else Vllm(engine, config.vllm.sleep_level),
        longest_sample=longest,
        vision_tower=model.vision_tower,
    )
    memory = plan_memory(run.tensors, run.decoder, run.training, run.vllm, gpu.memory_bytes, run.vision_tower)
    fits = max(rank.peak for rank in memory) <= gpu.memory_bytes * (1 - MARGIN)
    engine_fits = run.engine_fits(gpu.memory_bytes)
    half = [(prompt + args.max_completion_length // 2, args.max_completion_length // 2) for prompt in prompts]
    work = work_of(half, model.flops)
    halved, _ = micro_batches(config.batch, config.micro_batches, model, half)
    saved = saved_by_sharing(plan, config.batch, model, samples)
    return Estimate(
        longest=longest,
        plan=plan,
        largest=largest,
        fullest=packed,
        memory=memory,
        engine=engine,
        engine_fits=engine_fits,
        at_once=0 if engine is None else engine.sequences(gpu.memory_bytes, longest),
        fits=fits,
        changes=[] if fits else settings_that_fit(run, gpu.memory_bytes, _divides(args)),
        engine_changes=[]
        if engine is None or engine_fits
        else [flags for flags, _ in engines_that_fit(engine, gpu.memory_bytes, config.batch.layout.world_size)],
        work=work,
        train_seconds=_train_seconds(args, config, run.training, halved, model, gpu, work) * (1 - saved),
        even_stages=even_stages(work, run.decoder, run.training.layout, _fits(run, gpu, _divides(args))),
        generation_seconds=None
        if engine is None or not engine_fits
        else _generation_seconds(args, config, model, gpu, prompts, engine),
    )


def _of_step(values: Sequence[int], config: GRPOConfig) -> list[int]:
    """Return the value of the prompt of every sample of a step; rows repeat if there are fewer."""
    needed = max(1, math.ceil(config.batch.global_batch_size / config.batch.num_generations))
    prompts = [values[place % len(values)] for place in range(needed)]
    return [value for value in prompts for _ in range(config.batch.num_generations)][: config.batch.global_batch_size]


# ---- memory


def _training(args: GRPOArguments, config: GRPOConfig, largest: Tokens, plan: StepPlan, rows: Rows) -> Training:
    modules = tuple(args.target_modules if isinstance(args.target_modules, list) else [args.target_modules])
    every_module = "all-linear" in modules
    item = args.torch_dtype.itemsize
    states = [args.exp_avg_dtype.itemsize, args.exp_avg_sq_dtype.itemsize] if args.optimizer == "adam" else [4]
    if args.torch_dtype.itemsize < 4 or args.use_distributed_optimizer:
        bf16 = args.torch_dtype == torch.bfloat16
        states.append(master_bytes(args.main_params_dtype.itemsize, args.use_precision_aware_optimizer, bf16))
    return Training(
        layout=config.batch.layout,
        tokens=largest,
        micro_batches=plan.num_micro_batches,
        recompute=Recompute(
            args.recompute_granularity,
            args.recompute_method,
            args.recompute_num_layers,
            tuple(args.recompute_modules or ()),
            args.recompute_elementwise,
        ),
        lora_rank=args.lora_rank if args.has_adapter else None,
        lora_modules=() if every_module else modules,
        trains_language=not args.freeze_llm,
        trains_vision_tower=args.is_multimodal and not args.freeze_vit,
        trains_aligner=args.is_multimodal and not args.freeze_aligner,
        vision_tower_checkpointing=bool(args.vit_gradient_checkpointing),
        images=image_tokens_of(plan, config.batch, _of_step(rows.image_tokens, config)),
        weight_bytes=item,
        optimizer_bytes=sum(states),
        shards_optimizer=bool(args.use_distributed_optimizer),
        optimizer_on_cpu=float(args.optimizer_offload_fraction) if args.optimizer_cpu_offload else 0.0,
        frozen_reference=config.reference.beta != 0 and config.reference.model_dir is not None,
        offload_model=args.offload_model,
        offload_optimizer=args.offload_optimizer,
        offload_grad=args.offload_grad,
    )


def _filled(training: Training, packed: int) -> Training:
    """Return the same run with so many tokens in its largest micro batch, and as many micro batches as before."""
    return replace(with_budget(training, packed), micro_batches=training.micro_batches)


def _divides(args: GRPOArguments) -> Callable[[Layout], bool]:
    shape = args.model_shape

    def allows(layout: Layout) -> bool:
        return not any(faults_of_layout(layout, shape)) and args.global_batch_size % layout.data_parallel == 0

    return allows


def _fits(run: Run, gpu: Gpu, divides: Callable[[Layout], bool]) -> Callable[[Layout], bool]:
    def fits(layout: Layout) -> bool:
        other = replace(run, training=replace(run.training, layout=layout))
        return divides(layout) and all(other.fits(phase, gpu.memory_bytes) for phase in PHASES)

    return fits


# ---- time


def _train_seconds(
    args: GRPOArguments, config: GRPOConfig, training: Training, plan: StepPlan, model: Model, gpu: Gpu, work: StepWork
) -> float:
    old = config.num_iterations > 1 or config.batch.steps_per_generation > 1
    reference = config.reference.beta != 0
    passes = PassCounts(args.has_adapter, training.recompute.granularity == "full", old + reference)
    return seconds_of_training(
        work, gpu, model.decoder, training.layout, plan.num_micro_batches, passes, training.weight_bytes
    )


def _engine(args: GRPOArguments, config: GRPOConfig, model: Model, longest: int) -> Engine | None:
    if config.server is not None:
        return None
    item = args.torch_dtype.itemsize
    vision_tower = 0 if args.is_multimodal else sum(tensor.size for tensor in model.tensors if tensor.is_vision_tower)
    eight_bits = config.vllm.quantization != "none"
    return Engine(
        weight_bytes=model.bytes_in_vllm(item, eight_bits) - vision_tower * item,
        cache_bytes_per_token=model.cached * item,
        key_heads=model.key_heads,
        longest=longest,
        ranks=config.vllm.tensor_parallel_size,
        utilization=config.vllm.gpu_memory_utilization,
        given_cache=config.vllm.engine_kwargs.get("kv_cache_memory_bytes"),
    )


def _generation_seconds(
    args: GRPOArguments, config: GRPOConfig, model: Model, gpu: Gpu, prompts: list[int], engine: Engine
) -> float:
    """Return the seconds in which the training processes generate a rollout, for one optimizer step."""
    share = math.ceil(config.batch.generation_batch_size * engine.ranks / config.batch.layout.world_size)
    mean_length = sum(prompts) / len(prompts) + args.max_completion_length / 4
    at_once = max(1, min(share, config.vllm.max_num_seqs, engine.sequences(gpu.memory_bytes, mean_length)))
    seconds = seconds_of_generation(
        Generation(
            sequences=at_once,
            waves=share / at_once,
            steps=args.max_completion_length,
            weight_bytes=_bytes_of_a_step(args, config, model, at_once) / engine.ranks,
            cache_bytes_per_token=engine.cache_bytes_per_token / min(engine.ranks, engine.key_heads),
            mean_length=mean_length,
        ),
        gpu,
    )
    return seconds / config.batch.steps_per_generation


def _bytes_of_a_step(args: GRPOArguments, config: GRPOConfig, model: Model, sequences: int) -> float:
    """Return the bytes of the weights that a step of so many sequences reads."""
    item = args.torch_dtype.itemsize
    share = model.bytes_in_vllm(item, config.vllm.quantization != "none") / model.parameters
    return _weights_of_a_step(model, sequences) * share


def _weights_of_a_step(model: Model, sequences: int) -> float:
    """Return the parameters that a step of so many sequences reads; of experts, those that some sequence takes."""
    if not model.decoder.experts:
        return model.parameters
    experts = sum(tensor.size for tensor in model.tensors if ".experts." in tensor.name)
    missed = (1 - model.decoder.experts_per_token / model.decoder.experts) ** sequences
    return model.parameters - experts * missed
