"""Keys of ROLL's YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from swift_megatron_grpo.cli.convert.tables import (
    ByHand,
    Computed,
    Flags,
    Needless,
    NoCounterpart,
    Rule,
    Table,
    Together,
    bounds,
    choice,
    each,
    flags,
    values_of,
    when_positive,
    whole,
)

_ARGUMENTS, _LAYOUT = "actor_train.training_args", "actor_train.strategy_args.strategy_config"
_MODEL, _SAMPLING = "actor_train.model_args", "actor_infer.generating_args"
_ENGINE = "actor_infer.strategy_args.strategy_config"
_OWN = Needless("chosen by this trainer")
_SAME_AS_POLICY = Needless("the engine and the reference load the model of the policy")
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def _gpus(settings: Mapping[str, Any]) -> int:
    """Return how many GPUs train: the length of `list(range(0,8))` or of a list."""
    mapping = settings.get("actor_train.device_mapping", "")
    if isinstance(mapping, list):
        return len(mapping)
    match = re.fullmatch(r"\s*list\(range\((\d+),\s*(\d+)\)\)\s*", str(mapping))
    if match is None:
        raise NoCounterpart(
            "actor_train.device_mapping is not list(range(A,B)): set --global_batch_size, in completions"
        )
    return int(match[2]) - int(match[1])


def _batches(settings: Mapping[str, Any]) -> Flags:
    """Return sizes in completions. ROLL counts prompts of a rollout, and completions of each data-parallel rank."""
    size = whole(settings["num_return_sequences_in_group"])
    rollout = whole(settings["rollout_batch_size"]) * size
    gpus, micro = _gpus(settings), whole(settings.get(f"{_ARGUMENTS}.per_device_train_batch_size", 1))
    replicas = gpus
    for name in _SIZES:
        replicas //= whole(settings.get(f"{_LAYOUT}.{name}", 1))
    step = micro * whole(settings.get(f"{_ARGUMENTS}.gradient_accumulation_steps", 1)) * replicas
    differ = {"generation_batch_size": rollout} if rollout != step else {}
    sizes = {"num_generations": size, "global_batch_size": step, "micro_batch_size": micro}
    return {**sizes, **differ, "NPROC_PER_NODE": gpus}


def _kl(settings: Mapping[str, Any]) -> Flags:
    if settings.get("add_token_level_kl") and settings.get("init_kl_coef"):
        return {"beta": settings["init_kl_coef"], "kl_in_reward": True}
    return {"beta": settings.get("kl_loss_coef", 0) if settings.get("use_kl_loss") else 0, "kl_in_reward": False}


def _clip(settings: Mapping[str, Any]) -> Flags:
    both = settings.get("pg_clip", 0.2)
    low, high = (settings.get(f"pg_clip_{side}", both) for side in ("low", "high"))
    return bounds(low, high)


def _adapter(settings: Mapping[str, Any]) -> Flags:
    if not settings.get(f"{_MODEL}.lora_rank"):
        return {"tuner_type": "full"}
    adapter = {f"lora_{name}": settings.get(f"{_MODEL}.lora_{name}") for name in ("rank", "alpha", "dropout")}
    return {"tuner_type": "lora", **adapter, "target_modules": "all-linear"}


def _ahead(ratio: float) -> Flags:
    return {"async_generate": True, "max_staleness": max(1, round(ratio))} if ratio else {}


_RULES: dict[str, Rule] = {
    **flags("", """
        pretrain:model seed output_dir save_steps logging_steps prompt_length:max_length
        response_length:max_completion_length ppo_epochs:num_iterations entropy_loss_coef:entropy_coef
        max_len_mask:overlong_filter rollout_dump_dir:rollout_dump"""),
    **flags(f"{_ARGUMENTS}.", """
        learning_rate:lr lr_scheduler_type:lr_decay_style weight_decay warmup_steps:lr_warmup_iters
        num_train_epochs max_grad_norm:clip_grad"""),
    **flags(f"{_SAMPLING}.", "temperature top_p top_k"),
    **flags(f"{_ENGINE}.", """
        gpu_memory_utilization:vllm_gpu_memory_utilization tensor_parallel_size:vllm_tensor_parallel_size
        max_model_len:vllm_max_model_len max_num_seqs:vllm_max_num_seqs enforce_eager:vllm_enforce_eager
        enable_prefix_caching:vllm_enable_prefix_caching sleep_level"""),
    **each("", """
        tracker_kwargs.* is_num_return_sequences_expand enable_old_logprobs_recompute enable_reference num_gpus_per_node
        exp_name logging_dir rpc_timeout actor_train.device_mapping hydra.* defaults""", _OWN),
    **each(f"{_SAMPLING}.", "max_new_tokens num_return_sequences num_beams", _OWN),
    **each(f"{_ENGINE}.", "load_format block_size max_num_batched_tokens", _OWN),
    **each("", f"{_MODEL}.model_type {_LAYOUT}.bf16", _OWN),
    "reward_pretrain": ByHand("choose --reward_funcs"),
    "max_steps": when_positive("train_iters"),
    "eval_steps": when_positive("eval_steps"),
    "track_with": values_of("report_to", "tensorboard wandb swanlab stdout:"),
    "checkpoint_config.*": ByHand("checkpoints are written to --output_dir"),
    "resume_from_checkpoint": ByHand("to continue from a checkpoint: --resume auto, or --resume FOLDER"),
    "adv_estimator": values_of("advantage_estimator", "grpo reinforce:reinforce_plus_plus_plain",
                               "it needs a critic, or is not known here"),
    "dual_clip_loss": choice({"true": {"dual_clip": 3.0}, "false": {}}),
    "importance_sampling": values_of("importance_sampling_level", "token seq:sequence"),
    "value_clip": Needless("GRPO has no critic"),
    "async_generation_ratio": Computed(["async_generate", "max_staleness"], _ahead),
    "rewards.*": ByHand("write a reward class (docs of ms-swift: ORM), --external_plugins and --reward_funcs"),
    f"{_MODEL}.dtype": values_of("torch_dtype", "bf16:bfloat16 fp16:float16 fp32:float32"),
    f"{_MODEL}.disable_gradient_checkpointing": Needless("--recompute_granularity decides"),
    f"{_MODEL}.*attn*": ByHand("--attention_backend flash or fused"),
    f"{_MODEL}.freeze_module_prefix": ByHand("--freeze_vit and --freeze_aligner are true by default"),
    "actor_train.data_args.file_name": "dataset",
    "actor_train.data_args.messages": ByHand("rename the column to `messages`, or use --columns"),
    "actor_train.data_args.*": ByHand("see the flags of ms-swift for datasets"),
    "actor_train.infer_batch_size": "infer_batch_size",
    "actor_train.use_sequence_packing": Needless("sequences are always packed"),
    "actor_train.strategy_args.strategy_name": choice({"megatron_train": {}, "deepspeed_train": {}}),
    **flags(f"{_LAYOUT}.", """
        tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
        expert_tensor_parallel_size virtual_pipeline_model_parallel_size sequence_parallel use_distributed_optimizer
        recompute_granularity recompute_method recompute_num_layers overlap_grad_reduce moe_grouped_gemm
        moe_token_dispatcher_type optimizer_cpu_offload optimizer_offload_fraction use_precision_aware_optimizer
        accumulate_allreduce_grads_in_fp32"""),
    **flags(f"{_LAYOUT}.additional_configs.", "recompute_granularity recompute_method recompute_num_layers"),
    "actor_infer.strategy_args.strategy_name": choice({"vllm": {}, "sglang": {}}),
    "actor_infer.device_mapping": ByHand("other GPUs than those that train: start `swift rollout` on them"),
    "actor_infer.*": _SAME_AS_POLICY,
    "reference.*": _SAME_AS_POLICY,
    "critic.*": Needless("GRPO has no critic"),
    **flags("validation.", """
        data_args.file_name:val_dataset generating_args.num_return_sequences:num_generations_eval
        generating_args.temperature:eval_temperature generating_args.top_p:eval_top_p
        generating_args.max_new_tokens:eval_max_completion_length"""),
    "validation.*": ByHand("see docs/evaluation.md"),
    "system_envs.*": ByHand("export it"),
}  # fmt: skip

ROLL = Table(
    "ROLL",
    ("actor_train.", "actor_infer."),
    _RULES,
    defaults={
        "num_return_sequences_in_group": 1,
        "rollout_batch_size": 128,
        f"{_SAMPLING}.temperature": 1.0,
    },
    together=(
        Together(("num_return_sequences_in_group", "rollout_batch_size", f"{_ARGUMENTS}.per_device_train_batch_size",
                  f"{_ARGUMENTS}.gradient_accumulation_steps"),
                 ("num_generations", "global_batch_size", "micro_batch_size", "generation_batch_size",
                  "NPROC_PER_NODE"), _batches),
        Together(("use_kl_loss", "kl_loss_coef", "init_kl_coef", "add_token_level_kl"), ("beta", "kl_in_reward"), _kl),
        Together(("pg_clip", "pg_clip_low", "pg_clip_high"), ("epsilon", "epsilon_high"), _clip),
        Together(tuple(f"{_MODEL}.lora_{name}" for name in ("rank", "alpha", "dropout", "target")),
                 ("tuner_type", "lora_rank", "lora_alpha", "lora_dropout", "target_modules"), _adapter),
    ),
)  # fmt: skip
