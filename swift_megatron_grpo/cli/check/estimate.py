"""Estimate micro batches, memory and time of a step of a run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments
from swift_megatron_grpo.arguments.reward_models import folder_of
from swift_megatron_grpo.arguments.to_config import configure
from swift_megatron_grpo.cli.check.micro_batches import (
    AnswerBatches,
    Sample,
    fullest,
    media_tokens_of,
    micro_batches,
    saved_by_sharing,
)
from swift_megatron_grpo.cli.check.model import Model, read_model, shapes_of
from swift_megatron_grpo.cli.check.rows import Rows
from swift_megatron_grpo.cli.estimate.activations import Recompute, Tokens
from swift_megatron_grpo.cli.estimate.advice import Change, Run, engines_that_fit, settings_that_fit
from swift_megatron_grpo.cli.estimate.memory import PHASES, Engine, RankMemory, Training, master_bytes, with_budget
from swift_megatron_grpo.cli.estimate.parameters import Tensor, tensors_of
from swift_megatron_grpo.cli.estimate.throughput import (
    EvenStages,
    PassCounts,
    even_stages,
    seconds_of_generation,
    seconds_of_training,
    work_of,
)
from swift_megatron_grpo.packing.plan import StepPlan
from swift_megatron_grpo.runtime.gpus import Gpu
from swift_megatron_grpo.settings.config import GRPOConfig
from swift_megatron_grpo.settings.layout import Layout
from swift_megatron_grpo.settings.parallel import faults_of_layout
from swift_megatron_grpo.settings.reward_models import RewardModels
from swift_megatron_grpo.settings.speculation import Speculation
from swift_megatron_grpo.weights.export.prediction_layers import is_prediction
from swift_megatron_grpo.weights.stored_tensors import stored_tensors


@dataclass(frozen=True)
class Estimate:
    plan: StepPlan
    largest: Tokens  # micro batch, if all completions have --max_completion_length
    fullest: int  # tokens of the largest micro batch that completions of other lengths can make; memory is for it
    answers: AnswerBatches | None
    memory: list[RankMemory]  # by pipeline stage
    engine: Engine | None  # None: servers generate
    engine_fits: bool
    fits: bool
    changes: list[Change]
    engine_changes: list[str]  # flags with which vLLM fits into its share
    completion_tokens: int  # of a step whose completions have half of --max_completion_length, or the given lengths
    train_seconds: float
    even_stages: EvenStages | None  # None: nothing is gained
    generation_seconds: float | None  # of one step; None: servers generate
    with_two_steps: float | None  # the same with --steps_per_generation 2; None: servers, or several steps already


def bytes_of_reward_models(args: GRPOArguments) -> int:
    """Return the bytes of the models of --reward_model in every rank. Raises ValueError for unknown classes."""
    folders = [folder_of(args, one, with_weights=False) for one in args.of(RewardModels).all if one.address is None]
    item: int = args.torch_dtype.itemsize
    return item * sum(prod(shape) for folder in folders for shape in shapes_of(folder).values())


def estimate(
    args: GRPOArguments,
    model: Model,
    rows: Rows,
    gpu: Gpu,
    graders: int = 0,
    given: Sequence[Sample] = (),
    lengths: Sequence[int] = (),
) -> Estimate:
    """Estimate a run whose ranks hold reward models of this many bytes, `graders`. `given`: rows with answers.

    `lengths`: tokens of all completions of a step, if they are known, as in a benchmark.
    """
    config, gpu_bytes, shape = configure(args), gpu.memory_bytes, args.model_shape
    prompts = _of_step(rows.lengths, config)
    samples = _samples(prompts, lengths or [args.max_completion_length] * len(prompts))
    plan, largest = micro_batches(config.batch, config.micro_batches, model, samples)
    packed = largest.packed if lengths else fullest(plan, largest, config.batch, config.micro_batches, samples)
    longest = max(tokens for tokens, _ in samples)
    teacher_share = _teacher_share(args, config, model)
    training = replace(_training(args, config, largest, plan, rows), teacher_share=teacher_share, graders=graders)
    training = replace(with_budget(training, packed), micro_batches=training.micro_batches)
    answers = _answers(args, config, given) if given else None
    if answers is not None:
        of_step = training.micro_batches + answers.number
        training = replace(training, tokens=answers.joined(training.tokens), micro_batches=of_step)
    predicting = _prediction_layers(args)
    run = Run(
        tensors=[*model.tensors, *(predicting if training.trains_draft_head else ())],
        decoder=model.decoder,
        training=training,
        engine=_engine(args, config, model, longest, predicting),
        longest_sample=longest if answers is None else max(longest, answers.longest),
        vision_tower=model.vision_tower,
        audio_part=model.audio_part,
    )

    def divides(layout: Layout) -> bool:
        return not any(faults_of_layout(layout, shape)) and args.global_batch_size % layout.data_parallel == 0

    fits, engine, engine_fits = run.fits(gpu_bytes, *PHASES), run.engine, run.engine_fits(gpu_bytes)
    completions = lengths or [args.max_completion_length // 2] * len(prompts)
    usual = _samples(prompts, completions)
    answered = answers.of_step if answers is not None else []
    work = work_of([*usual, *answered], model.flops)
    usual_plan, _ = micro_batches(config.batch, config.micro_batches, model, usual)
    passes = _passes(config, args.has_adapter, recomputes=run.training.recompute.granularity == "full")
    layout, item = config.batch.layout, args.torch_dtype.itemsize
    several = usual_plan.num_micro_batches + (answers.number if answers is not None else 0)
    seconds = seconds_of_training(work, gpu, model.decoder, layout, several, passes, item)
    return Estimate(
        plan=plan,
        largest=largest,
        fullest=packed,
        answers=answers,
        memory=run.memory(gpu_bytes),
        engine=engine,
        engine_fits=engine_fits,
        fits=fits,
        changes=[] if fits else settings_that_fit(run, gpu_bytes, divides),
        engine_changes=[]
        if engine is None or engine_fits
        else [flags for flags, _ in engines_that_fit(engine, gpu_bytes, layout.world_size)],
        completion_tokens=sum(completions),
        train_seconds=seconds * (1 - saved_by_sharing(plan, config.batch, model, samples)),
        even_stages=even_stages(
            work, run.decoder, layout, lambda at: divides(at) and run.with_training(layout=at).fits(gpu_bytes, *PHASES)
        ),
        generation_seconds=None
        if engine is None or not engine_fits
        else _generation_seconds(args, config, model, gpu, usual, engine),
        with_two_steps=None
        if engine is None or not engine_fits or config.batch.steps_per_generation > 1
        else _generation_seconds(args, config, model, gpu, usual, engine, rollouts=2),
    )


def _passes(config: GRPOConfig, trains_adapters: bool, recomputes: bool) -> PassCounts:
    has_teacher = config.teacher.exists
    several_steps = config.num_iterations > 1 or config.batch.steps_per_generation > 1
    old = has_teacher or (several_steps and config.loss.correction.old_logprobs == "policy")
    forward_only = old + (config.reference.beta != 0) + (has_teacher and not config.teacher.is_served)
    return PassCounts(trains_adapters, recomputes, forward_only)


def _answers(args: GRPOArguments, config: GRPOConfig, given: Sequence[Sample]) -> AnswerBatches:
    batch, chord = config.batch, config.chord
    of_step = chord.answers(batch.global_batch_size // batch.micro_batch_size)
    budget = config.micro_batches.max_tokens_per_micro_batch
    return AnswerBatches.plan(given, of_step, chord.answers(1), batch.layout, budget)


def _samples(prompts: Sequence[int], completions: Sequence[int]) -> list[Sample]:
    return [(prompt + own, own) for prompt, own in zip(prompts, completions, strict=True)]


def _of_step(values: Sequence[int], config: GRPOConfig) -> list[int]:
    """Return the value of the prompt of every sample of a step; rows repeat if there are fewer."""
    needed = max(1, math.ceil(config.batch.global_batch_size / config.batch.num_generations))
    prompts = [values[place % len(values)] for place in range(needed)]
    return [value for value in prompts for _ in range(config.batch.num_generations)][: config.batch.global_batch_size]


def _training(args: GRPOArguments, config: GRPOConfig, largest: Tokens, plan: StepPlan, rows: Rows) -> Training:
    modules = tuple(args.target_modules if isinstance(args.target_modules, list) else [args.target_modules])
    every_module = "all-linear" in modules
    of_adam, momentum = [args.exp_avg_dtype.itemsize, args.exp_avg_sq_dtype.itemsize], [4]
    states = momentum if args.optimizer == "sgd" else of_adam
    masters = []
    if args.torch_dtype.itemsize < 4 or args.use_distributed_optimizer:
        bf16 = args.torch_dtype == torch.bfloat16
        masters = [master_bytes(args.main_params_dtype.itemsize, args.use_precision_aware_optimizer, bf16)]
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
        sees=list(args.trained_media) != ["audio"],
        hears=not args.trained_media or "audio" in args.trained_media,
        images=media_tokens_of(plan, config.batch, _of_step(rows.image_tokens, config)),
        recordings=media_tokens_of(plan, config.batch, _of_step(rows.heard_tokens, config)),
        weight_bytes=args.torch_dtype.itemsize,
        optimizer_bytes=sum(states + masters),
        matrix_bytes=sum(momentum + masters) if args.optimizer == "muon" else None,
        shards_optimizer=bool(args.use_distributed_optimizer),
        optimizer_on_cpu=float(args.optimizer_offload_fraction) if args.optimizer_cpu_offload else 0.0,
        frozen_reference=config.reference.beta != 0 and config.reference.model_dir is not None,
        trains_draft_head=bool(args.mtp_num_layers),
        offload_model=args.offload_model,
        offload_optimizer=args.offload_optimizer,
        offload_grad=args.offload_grad,
    )


def _teacher_share(args: GRPOArguments, config: GRPOConfig, model: Model) -> float:
    """Return the parameters of a teacher's copy by those of the model; 0: the copy of the reference is the teacher."""
    if not config.teacher.is_copy or config.reference.is_teacher:
        return 0.0
    return read_model(args.teacher_model_dir).parameters / model.parameters


def _prediction_layers(args: GRPOArguments) -> list[Tensor]:
    """Return the layers that predict drafts, which no class of transformers has; [] if the run has no such drafts."""
    if not args.of(Speculation).predicts:
        return []
    stored = stored_tensors(args.model_dir)
    return tensors_of({name: tensor.shape for name, tensor in stored.items() if is_prediction(name)})


def _engine(
    args: GRPOArguments, config: GRPOConfig, model: Model, longest: int, predicting: Sequence[Tensor]
) -> Engine | None:
    if config.server is not None:
        return None
    item = args.torch_dtype.itemsize
    limits = config.engine.vllm_limit_mm_per_prompt
    absent = [tensor for tensor in model.tensors if tensor.is_vision_tower and not _is_in_vllm(tensor, limits)]
    eight_bits = config.engine.rollout_quantization != "none"
    return Engine(
        weight_bytes=model.bytes_in_vllm(item, eight_bits)
        + (sum(tensor.size for tensor in predicting) - sum(tensor.size for tensor in absent)) * item,
        # a layer that predicts has an attention of its own
        cache_bytes_per_token=(model.cached + 2 * model.decoder.keys * bool(predicting)) * item,
        key_heads=model.key_heads,
        longest=longest,
        ranks=config.engine.vllm_tensor_parallel_size,
        utilization=config.engine.vllm_gpu_memory_utilization,
        given_cache=config.engine.vllm_engine_kwargs.get("kv_cache_memory_bytes"),
        sleep_level=config.engine.sleep_level,
    )


def _is_in_vllm(tensor: Tensor, limits: Mapping[str, Any] | None) -> bool:
    """Return True for an image or an audio part that vLLM builds. `limits`: on media; None: of a model of text."""
    kinds = ("audio",) if tensor.is_audio_part else ("image", "video")
    allowed = [limits.get(kind, 1) for kind in kinds] if limits is not None else []  # a kind without one is not limited
    return any((limit.get("count", 1) if isinstance(limit, dict) else limit) > 0 for limit in allowed)


def _generation_seconds(
    args: GRPOArguments,
    config: GRPOConfig,
    model: Model,
    gpu: Gpu,
    samples: Sequence[Sample],
    engine: Engine,
    rollouts: int = 1,
) -> float:
    """Return the seconds in which the training processes generate a rollout, for one optimizer step.

    `rollouts`: that are generated together, each for its steps.
    """
    share = math.ceil(config.batch.generation_batch_size * rollouts * engine.ranks / config.batch.layout.world_size)
    slots = args.vllm_max_num_seqs or share
    mean_length = sum(tokens - completion / 2 for tokens, completion in samples) / len(samples)
    at_once = max(1, min(share, slots, engine.sequences(gpu.memory_bytes, mean_length)))
    read: float = model.parameters
    if model.decoder.experts:  # a step reads those that some sequence takes
        experts = sum(tensor.size for tensor in model.tensors if ".experts." in tensor.name)
        read -= experts * (1 - model.decoder.experts_per_token / model.decoder.experts) ** at_once
    eight_bits = config.engine.rollout_quantization != "none"
    weights = model.bytes_in_vllm(args.torch_dtype.itemsize, eight_bits) / model.parameters
    seconds = seconds_of_generation(
        gpu,
        steps=args.max_completion_length * share / at_once,
        bytes_of_step=read * weights / engine.ranks + at_once * mean_length * engine.cache_per_token,
    )
    return seconds / config.batch.steps_per_generation / rollouts
