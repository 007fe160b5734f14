"""Run every check of the arguments of one run, in the three orders that ms-swift requires.

The checks themselves are pure functions in the other files of this folder. Each raises a ValueError that names the
fault, the flag, and a value that works; all faults are reported together, before a model loads.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from functools import partial
from typing import Any

import torch
from swift.megatron.callbacks import MegatronCallback, megatron_callbacks_map
from swift.rewards import orms
from swift.rollout import MultiTurnScheduler, envs, multi_turns
from swift.utils import import_external_file

from swift_megatron_grpo.arguments import image_checks as images
from swift_megatron_grpo.arguments import model_checks as models
from swift_megatron_grpo.arguments import value_checks as values
from swift_megatron_grpo.arguments.advice import typed_value
from swift_megatron_grpo.arguments.derived import DerivedArguments, as_list
from swift_megatron_grpo.arguments.flag_combinations import STOCK_TRAINER, check_flags
from swift_megatron_grpo.arguments.named_paths import check_paths
from swift_megatron_grpo.arguments.problems import check_all
from swift_megatron_grpo.arguments.rope import check_composite_rope, check_rope_scaling
from swift_megatron_grpo.arguments.stacked_experts import check_stacked_experts
from swift_megatron_grpo.arguments.trained_parameters import check_target_modules, check_trained
from swift_megatron_grpo.generation.conversations import checks as turns
from swift_megatron_grpo.generation.conversations.checks import check_registered
from swift_megatron_grpo.generation.vllm.engine_kwargs import check_engine_kwargs, parse_json_object
from swift_megatron_grpo.output.checkpoints.sources import check_optimizer_state, check_quickly
from swift_megatron_grpo.output.recording import folder as recording
from swift_megatron_grpo.platforms.attention_packages import has_flash_attention
from swift_megatron_grpo.settings.batch_plan import resolve
from swift_megatron_grpo.settings.facts import DataShape
from swift_megatron_grpo.settings.flag import check, check_finite
from swift_megatron_grpo.settings.groups import GROUPS, RANGES
from swift_megatron_grpo.weights.load.quantization import check_quantization

# --report_to none, as in transformers: ms-swift's Megatron looks it up as the name of a callback
megatron_callbacks_map.setdefault("none", MegatronCallback)


def check_command_line(args: DerivedArguments) -> None:
    """Check the values that the user typed, before ms-swift resolves them."""
    # Importing the files registers reward functions. ms-swift imports them again later, which changes nothing.
    for flag in ("external_plugins", "custom_register_path"):
        values.import_plugins(flag, as_list(getattr(args, flag)), import_external_file)
    check_all(
        [
            lambda: check_flags(args),
            lambda: check(GROUPS, vars(args), args.facts(typed=True)),
            lambda: check_ranges(args),
            lambda: check_trained(vars(args)),
            lambda: _check_json(args),
            lambda: check_rope_scaling(args.rope_scaling, args.max_model_len),
            lambda: _check_model_path(args),
            lambda: check_paths(args),
            lambda: _check_checkpoints(args),
            lambda: _check_reference(args),
            lambda: check_rewards(args),
            lambda: _check_evaluation(args),
            lambda: _check_callbacks(args),
            lambda: _check_turns(args),
            lambda: check_recording(args),
            lambda: _check_adapter_sync(args),
            lambda: check_quantization(args.rollout_quantization, args.vllm_enable_lora, None, None),
            values.check_vllm_installed,
        ]
    )


def check_with_model_config(args: DerivedArguments) -> None:
    """Check what depends on the model's config, which ms-swift has read; it has created nothing else yet."""
    check_all(
        [
            lambda: check_flags(args),
            lambda: check_ranges(args),
            lambda: check(GROUPS, vars(args), args.facts()),
            lambda: _check_model(args),
            lambda: _check_precision(args),
            lambda: _check_quantization(args),
            lambda: _check_cpu_optimizer(args),
            lambda: _check_reference_adapter(args),
        ]
    )


def check_images(args: DerivedArguments, most: int) -> None:
    """Check what depends on the images of the datasets. `most`: in one row."""
    check_all(
        [
            lambda: check(GROUPS, vars(args), args.facts(DataShape(most))),
            lambda: images.check_parts(
                most,
                args.freeze_vit or not args.is_multimodal,
                args.freeze_aligner or not args.is_multimodal,
                args.language_model_only,
                args.vllm_enable_lora,
                args.has_adapter,
                args.vit_lr,
                args.aligner_lr,
            ),
            lambda: _check_image_part(args) if most else None,
        ]
    )


def _check_image_part(args: DerivedArguments) -> None:
    """Check that Megatron and vLLM can divide the image part of the model."""
    vision = args.model_config.get("vision_config") or {}
    if not args.uses_servers:
        images.check_vision_tower_heads(vision, args.vllm_tensor_parallel_size, args.vllm_engine_kwargs)
    images.check_deepstack(vision, args.layout, args.model_shape.layers)


def check_ranges(args: DerivedArguments) -> None:
    """Check numbers against their ranges, and the flags of the learning rate against each other."""
    given = {field.name: getattr(args, field.name) for field in fields(args)}
    defaults = {field.name: _default(field) for field in fields(args)}
    check_finite(given, defaults, {*RANGES, "reward_weights", "eval_temperature"})


def check_rewards(args: DerivedArguments) -> None:
    """Check reward functions and weights; skipped while the servers' part in grading is unknown."""
    if args.servers_may_grade:
        return
    if args.reward_funcs or not args.grades_by_environment:
        values.check_reward_functions(args.reward_funcs, orms)
        values.check_reward_classes(args.reward_funcs, orms)
        longest = args.soft_max_length or args.max_completion_length
        values.check_soft_overlong(args.reward_funcs, args.soft_cache_length, longest)
    values.check_reward_weights(args.reward_weights, len(args.reward_names))


def _check_evaluation(args: DerivedArguments) -> None:
    """Check names against the datasets and the reward functions."""
    if args.evaluates:
        check_all([lambda: args.evaluation_names, lambda: args.correct_reward])


def check_recording(args: DerivedArguments) -> None:
    """Check the recording flags, and the folders on disk against the settings of this run."""
    if args.dump_folder is not None and not args.servers_may_grade:
        stopped_early = dict(args.typed) if args.resume == "auto" else None  # before its first checkpoint
        recording.check_dump(args.dump_folder, args.recording_settings(), args.resumes, stopped_early)
    if args.replay_folder is not None:
        recording.check_replay(args.replay_folder, args.recording_settings())


def _check_json(args: DerivedArguments) -> None:
    """Check the flags that take JSON, and the settings of vLLM in the training processes among them."""

    def check_engine() -> None:
        settings = parse_json_object("vllm_engine_kwargs", args.vllm_engine_kwargs)
        if not args.uses_servers:  # otherwise the flag has no effect, as the start-up log notes
            check_engine_kwargs(settings, adapter_only=args.vllm_enable_lora)

    others = [flag for flag in values.JSON_FLAGS if flag != "vllm_engine_kwargs"]
    check_all([check_engine, *(partial(parse_json_object, flag, getattr(args, flag)) for flag in others)])


def _check_callbacks(args: DerivedArguments) -> None:
    for flag in ("callbacks", "report_to"):
        registry = "swift.megatron.callbacks.megatron_callbacks_map"
        check_registered(flag, as_list(getattr(args, flag)), megatron_callbacks_map, registry)


def _check_model_path(args: DerivedArguments) -> None:
    resumed_from = args.mcore_model or args.mcore_adapter or args.adapters  # their args.json contains the model
    if args.model is None and not resumed_from:
        raise ValueError("no model is set; use --model with a folder or a hub id")
    for flag in ("model", "ref_model"):
        if getattr(args, flag) is not None:
            values.check_model_path(getattr(args, flag), flag, bare_ids=args.use_hf)


def _check_checkpoints(args: DerivedArguments) -> None:
    """Check the files that ms-swift reads next; the trainer verifies the large ones, in parallel."""
    if args.verify_checkpoint:
        check_quickly(args.checkpoint_sources)
    if args.resumes and not args.no_load_optim:
        check_optimizer_state(source for source in args.checkpoint_sources if source.flag != "mcore_ref_model")


def _check_reference(args: DerivedArguments) -> None:
    """Check the batch sizes against the data-parallel size of a reference copy in its own layout."""
    layout = args.reference_layout
    if layout is None:
        return
    if args.beta == 0 or args.has_adapter:
        reason = "the reference of a LoRA run is the model without its adapter" if args.has_adapter else "--beta is 0"
        raise ValueError(
            f"the --ref_..._parallel_size flags need a frozen reference copy, and {reason}; leave them out"
        )
    resolve(
        layout,
        micro_batch_size=1,
        global_batch_size=args.global_batch_size,
        num_generations=args.num_generations,
        generation_batch_size=args.generation_batch_size,
        steps_per_generation=args.steps_per_generation,
    )


def _check_model(args: DerivedArguments) -> None:
    """Check what this trainer has to know of the architecture in config.json."""
    config = args.model_config
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    models.check_kernels(args.model, config, on_hopper)
    models.check_attention_layers(args.model, config)
    if torch.cuda.is_available():
        backend = str(typed_value(args.attention_backend))
        models.check_flash_attention(backend, args.context_parallel_size, has_flash_attention())
    check_stacked_experts(args.model, args.model_dir, config)
    if not args.model_meta.is_multimodal:
        check_target_modules(args.target_modules)
    else:
        check_composite_rope(args.rope_scaling, config)
        models.check_composite(
            args.model, config["model_type"], args.freeze_llm, args.freeze_vit, args.freeze_aligner, STOCK_TRAINER
        )
        models.check_language_model(args.model, config, STOCK_TRAINER)


def _check_precision(args: DerivedArguments) -> None:
    """Refuse checkpoints that ms-swift would train in fp16; support_table.NOT_YET gives the reason."""
    if args.fp16 is None and args.torch_dtype in (torch.float16, torch.float32):
        raise ValueError(
            f"--model {args.model} has torch_dtype {str(args.torch_dtype).removeprefix('torch.')}, which ms-swift "
            "would train in fp16, and fp16 is not supported; use --torch_dtype bfloat16, or --fp16 false for fp32"
        )


def _check_quantization(args: DerivedArguments) -> None:
    """Check --rollout_quantization against the model; vLLM's part and servers check their own devices."""
    dtype = str(args.torch_dtype).removeprefix("torch.")
    check_quantization(args.rollout_quantization, args.vllm_enable_lora, dtype, None)


def _check_cpu_optimizer(args: DerivedArguments) -> None:
    """Refuse what Megatron's optimizer with states on the CPU cannot do; it fails once the model is built."""
    if args.optimizer_cpu_offload and args.use_distributed_optimizer:
        values.check_distributed_cpu_optimizer(args.torch_dtype == torch.float32, args.optimizer)


def _check_reference_adapter(args: DerivedArguments) -> None:
    if args.ref_adapters:
        trained = {name: getattr(args, name) for name in ("lora_rank", "lora_alpha", "use_rslora")}
        for folder in as_list(args.adapters):  # whose settings ms-swift takes later
            trained |= values.adapter_settings(folder)
        values.check_reference_adapter(args.ref_adapters, trained, args.modules_to_save)


def _check_adapter_sync(args: DerivedArguments) -> None:
    sleep_level = 0 if args.uses_servers else args.sleep_level
    values.check_adapter_sync(
        args.vllm_enable_lora, args.has_adapter, args.lora_rank, sleep_level, args.mcore_model, args.sync_check
    )


def _check_turns(args: DerivedArguments) -> None:
    if args.uses_servers:  # a server has its own schedulers and environments, and reports them later
        turns.check_max_turns(args.max_turns)
        return
    with_own_run = [name for name, scheduler in multi_turns.items() if scheduler.run is not MultiTurnScheduler.run]
    turns.check_multi_turn(
        args.multi_turn_scheduler, args.max_turns, args.use_gym_env, args.gym_env, multi_turns, with_own_run, envs
    )


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
