"""Keys of ROLL's YAML."""

from __future__ import annotations

import re
from typing import Any

from swift_megatron_grpo.cli.convert.tables import (
    ByHand,
    Computed,
    Flags,
    Needless,
    NoCounterpart,
    Rule,
    Table,
    batch_sizes,
    choice,
    clip,
    each,
    flags,
    together,
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


def _gpus(mapping: Any) -> int:
    """Return how many GPUs train: the length of `list(range(0,8))` or of a list."""
    if isinstance(mapping, list):
        return len(mapping)
    match = re.fullmatch(r"\s*list\(range\((\d+),\s*(\d+)\)\)\s*", str(mapping))
    if match is None:
        reason = "actor_train.device_mapping is not list(range(A,B))"
        raise NoCounterpart(f"{reason}: set --global_batch_size, in completions")
    return int(match[2]) - int(match[1])


def _batches(group: Any, rollout: Any, micro: Any = 1, accumulated: Any = 1, devices: Any = "", **layout: Any) -> Flags:
    """Return sizes in completions. ROLL counts prompts of a rollout, and completions of each data-parallel rank."""
    size, gpus = whole(group), _gpus(devices)
    replicas = gpus
    for ranks in layout.values():
        replicas //= whole(ranks)
    sizes = batch_sizes(size, whole(micro) * whole(accumulated) * replicas, whole(rollout) * size)
    return {**sizes, "micro_batch_size": micro, "NPROC_PER_NODE": gpus}


def _kl(in_loss: Any = False, of_loss: Any = 0, of_reward: Any = 0, in_reward: Any = False) -> Flags:
    if in_reward and of_reward:
        return {"beta": of_reward, "kl_in_reward": True}
    return {"beta": of_loss if in_loss else 0, "kl_in_reward": False}


def _adapter(rank: Any = None, alpha: Any = None, dropout: Any = None, target: Any = None) -> Flags:
    if not rank:
        return {"tuner_type": "full"}
    sizes = {"lora_rank": rank, "lora_alpha": alpha, "lora_dropout": dropout}
    return {"tuner_type": "lora", **sizes, "target_modules": "all-linear"}


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
    defaults={"num_return_sequences_in_group": 1, "rollout_batch_size": 128, f"{_SAMPLING}.temperature": 1.0},
    together=(
        together(_batches, "num_generations global_batch_size micro_batch_size generation_batch_size NPROC_PER_NODE",
                 group="num_return_sequences_in_group", rollout="rollout_batch_size",
                 micro=f"{_ARGUMENTS}.per_device_train_batch_size",
                 accumulated=f"{_ARGUMENTS}.gradient_accumulation_steps",
                 reads={"devices": "actor_train.device_mapping", **{name: f"{_LAYOUT}.{name}" for name in _SIZES}}),
        together(_kl, "beta kl_in_reward", in_loss="use_kl_loss", of_loss="kl_loss_coef", of_reward="init_kl_coef",
                 in_reward="add_token_level_kl"),
        together(clip, "epsilon epsilon_high", both="pg_clip", low="pg_clip_low", high="pg_clip_high"),
        together(_adapter, "tuner_type lora_rank lora_alpha lora_dropout target_modules",
                 rank=f"{_MODEL}.lora_rank", alpha=f"{_MODEL}.lora_alpha", dropout=f"{_MODEL}.lora_dropout",
                 target=f"{_MODEL}.lora_target"),
    ),
)  # fmt: skip
