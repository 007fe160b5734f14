"""Convert the arguments into the frozen settings of the stages, which do not read the arguments themselves."""

import os

import torch

from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments
from swift_megatron_grpo.arguments.refused import OMNI
from swift_megatron_grpo.generation.protocol.api_key import read_api_key
from swift_megatron_grpo.generation.protocol.model_identity import model_identity, position_identity, precision_identity
from swift_megatron_grpo.settings import adapter, asynchronous, batches, config, images, positions, routing, time_limits
from swift_megatron_grpo.settings.algorithm import Algorithm
from swift_megatron_grpo.settings.sampling import Evaluation, Sampling
from swift_megatron_grpo.settings.servers import Servers
from swift_megatron_grpo.settings.speculation import Speculation

_BUCKET_VARIABLE = "SWIFT_UPDATE_WEIGHTS_BUCKET_SIZE"  # ms-swift's, in MiB


def configure(args: GRPOArguments) -> config.GRPOConfig:
    """Return the settings of all stages. Call it after ms-swift has finished parsing."""
    plan, evaluation = args.batch_sizes(), args.of(Evaluation)
    turns = None if args.uses_servers else args.multi_turn_scheduler
    return config.GRPOConfig.of(
        vars(args),
        batch=plan,
        sampling=args.of(Sampling).settings(),
        engine=_engine(args, plan),
        server=configure_server(args),
        turns=None if turns is None else config.MultiTurnConfig(turns, args.max_turns, args.gym_env),
        grading=config.GradingConfig.of(
            vars(args),
            reward_names=args.reward_names,
            reward_weights=tuple(map(float, args.reward_weights or [1.0] * len(args.reward_names))),
            max_resample_times=args.max_resample_times if args.dynamic_sample else 0,
            spare_groups=args.of(Algorithm).most_spare_groups,
        ),
        evaluation=config.EvaluationConfig(
            sampling=evaluation.sampling(args.of(Sampling)),
            num_generations=evaluation.generations,
            prompts_at_once=args.evaluated_at_once,
            most_prompts=args.most_evaluated or None,
            before_training=args.eval_before_train,
            correct_reward=args.correct_reward,
            correct_from=args.eval_correct_from,
            names=args.evaluation_names,
        ),
        vision_tower_share=args.of(images.Images).trained_share(args.most_images + args.most_videos),
        saved=_saved_parts(args),
        vocabulary=model_identity(args.model_config)["vocab_size"],
        max_staleness=args.of(asynchronous.Asynchronous).rollouts_ahead,
        trace_steps=args.of(time_limits.Trace).steps,
    )


def _saved_parts(args: GRPOArguments) -> config.SavedParts:
    in_megatron_format = not (args.save_safetensors and args.no_save_optim)
    merged = args.save_safetensors and args.has_adapter and args.merge_lora
    # At most: Muon has one for a matrix.
    states = [] if args.optimizer == "sgd" else [args.exp_avg_dtype, args.exp_avg_sq_dtype]
    if args.torch_dtype != torch.float32 or args.use_distributed_optimizer:
        states.append(args.main_params_dtype)  # otherwise the model's own weights are updated
    return config.SavedParts(
        adapter_only=args.has_adapter,
        copies=in_megatron_format + (args.save_safetensors and not merged) + args.sync_ref_model,
        merged_copies=int(merged),
        whole_models=int(args.save_safetensors and (merged or not args.has_adapter)),
        optimizer_bytes=0 if args.no_save_optim else sum(state.itemsize for state in states),
    )


def _engine(args: GRPOArguments, plan: batches.BatchSizes) -> config.VllmConfig:
    completions_per_engine = -(-plan.generation_batch_size // plan.layout.world_size) * args.vllm_tensor_parallel_size
    media = {"image": args.most_images, "video": args.most_videos}  # vLLM builds no vision tower without images
    if args.model_config["model_type"] in OMNI:  # no other type has this limit
        media["audio"] = args.most_recordings
    return config.VllmConfig.of(
        vars(args),
        vllm_max_num_seqs=args.vllm_max_num_seqs or completions_per_engine,
        vllm_limit_mm_per_prompt=args.vllm_limit_mm_per_prompt or (media if args.is_multimodal else None),
        vllm_engine_kwargs=args.vllm_engine_kwargs or {},
        lora_rank=args.of(adapter.Adapter).slot,
        base_differs=args.mcore_model is not None,
        hf_overrides=args.of(positions.Positions).overrides(args.model_config),
        returns_experts=args.of(routing.Routing).requested(1) > 0,
        has_experts=args.model_shape.experts is not None,
        drafts=args.of(Speculation).drafts,
        predicts_drafts=args.of(Speculation).predicts,
    )


def configure_server(args: GRPOArguments) -> config.ServerConfig | None:
    """Return the settings of the rollout servers; None: vLLM runs in the training processes."""
    if not args.uses_servers:
        return None
    servers, moved = args.of(Servers), args.of(positions.Positions).overrides(args.model_config)
    place = position_identity({**args.model_config, **moved})
    return config.ServerConfig(
        urls=servers.urls,
        group_ports=servers.group_ports,
        timeout=args.vllm_server_timeout,
        request_timeout=args.vllm_request_timeout,
        api_key=read_api_key(os.environ),
        bucket_bytes=int(os.environ.get(_BUCKET_VARIABLE, 512)) * 2**20,
        needed_length=(args.max_length or 1) + args.longest_completion,
        model=model_identity(args.model_config) | place | precision_identity(args.torch_dtype),
        lora_rank=args.lora_rank if args.vllm_enable_lora else None,
        turns=servers.turns,
        limits_conversations=args.completion_length_limit_scope == "total",
        images=args.most_images,
        recordings=args.most_recordings,
        videos=args.most_videos,
        returns_experts=args.of(routing.Routing).requested(1) > 0,
        quantization=args.rollout_quantization,
        batch_invariant=args.batch_invariant,
        drafts=args.of(Speculation).drafts,
        updates_in_flight=args.in_flight_weight_updates,
    )
