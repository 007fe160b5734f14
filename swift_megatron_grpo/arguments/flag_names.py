"""Flags that ms-swift's parser does not know: names of ms-swift 3, and misspelt ones. One error lists all of them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields

from swift_megatron_grpo.arguments.derived import AddedFlags

# Names of ms-swift 3.12, from its Megatron arguments.
RENAMED: Mapping[str, str] = {
    "train_type": "tuner_type",
    "max_epochs": "num_train_epochs",
    "save": "output_dir",
    "load": "mcore_model",
    "adapter_load": "mcore_adapter",
    "ref_load": "mcore_ref_model",
    "ref_adapter_load": "mcore_ref_adapter",
    "save_interval": "save_steps",
    "eval_interval": "eval_steps",
    "log_interval": "logging_steps",
    "tensorboard_log_interval": "logging_steps",
    "num_workers": "dataloader_num_workers",
    "manual_gc_interval": "manual_gc_steps",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "distributed_backend": "ddp_backend",
    "gradient_checkpointing_kwargs": "vit_gradient_checkpointing_kwargs",
    "seq_length": "max_length",
}
_CHANGED: Mapping[str, str] = {  # the name and the value
    "save_retain_interval": "--save_total_limit, the number of checkpoints to keep",
    "distributed_timeout_minutes": "--ddp_timeout, in seconds",
    "num_layers_per_virtual_pipeline_stage": "--virtual_pipeline_model_parallel_size, the number of virtual stages",
    "num_virtual_stages_per_pipeline_rank": "--virtual_pipeline_model_parallel_size",
    "dataloader_type": "--train_dataloader_shuffle true or false",
    "no_initialization": "--perform_initialization true or false",
    "no_bias_swiglu_fusion": "--bias_activation_fusion false",
    "no_rope_fusion": "--apply_rope_fusion false",
    "no_data_sharding": "--data_sharding true or false",
    "use_flash_attn": "--attention_backend flash",
    "wandb_save_dir": "the environment variable WANDB_DIR",
    "logging_level": "the environment variable LOG_LEVEL",
    "moe_router_bias_update_rate": """--megatron_extra_kwargs '{"moe_router_bias_update_rate": 0.001}'""",
}
_AS_NEAR = 0.05  # difference of two ratios of difflib

# Names of transformers and TRL, as `swift rlhf` has them, and common short ones.
_ELSEWHERE: Mapping[str, str] = {
    "learning_rate": "--lr",
    "per_device_train_batch_size": "--micro_batch_size, in completions, and --global_batch_size",
    "per_device_eval_batch_size": "--num_generations_eval, the completions of a prompt",
    "gradient_accumulation_steps": "--global_batch_size, the completions of an optimizer step on all ranks",
    "max_steps": "--train_iters",
    "num_epochs": "--num_train_epochs",
    "warmup_ratio": "--lr_warmup_fraction",
    "warmup_steps": "--lr_warmup_iters",
    "lr_scheduler_type": "--lr_decay_style",
    "max_grad_norm": "--clip_grad",
    "adam_epsilon": "--adam_eps",
    "gradient_checkpointing": "--recompute_granularity full or selective",
    "save_only_model": "--no_save_optim true",
    "resume_from_checkpoint": "--mcore_model FOLDER --finetune false",
    "kl_coef": "--beta",
    "deepspeed": "--use_distributed_optimizer true, which shards the optimizer's states",
    "eval_strategy": "--eval_steps",
    "vllm_server_url": "--vllm_server_base_url",
    "lora_r": "--lora_rank",
    "dtype": "--torch_dtype bfloat16",
    "log_level": "the environment variable LOG_LEVEL",
    "tp": "--tensor_model_parallel_size",
    "pp": "--pipeline_model_parallel_size",
    "cp": "--context_parallel_size",
    "ep": "--expert_model_parallel_size",
    "tensor_parallel_size": "--tensor_model_parallel_size",
    "pipeline_parallel_size": "--pipeline_model_parallel_size",
    "expert_parallel_size": "--expert_model_parallel_size",
}


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


_FROM_CONFIG = _names(
    """
    activation_func_clamp_value add_qkv_bias architectures attention_dropout disable_bias_linear ffn_hidden_size
    glu_linear_offset group_query_attention hidden_dropout hidden_size kv_channels kv_lora_rank layer_types
    linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim
    llm_architectures max_position_embeddings moe_apply_probs_on_input moe_ffn_hidden_size moe_layer_freq
    moe_router_enable_expert_bias moe_router_group_topk moe_router_num_groups moe_router_pre_softmax
    moe_router_score_function moe_router_topk moe_router_topk_scaling_factor moe_shared_expert_intermediate_size
    mrope_interleaved mrope_section multi_latent_attention no_rope_freq norm_epsilon normalization num_attention_heads
    num_experts num_layers num_query_groups original_max_position_embeddings padded_vocab_size partial_rotary_factor
    position_embedding_type q_lora_rank qk_head_dim qk_l2_norm qk_layernorm qk_pos_emb_head_dim quick_geglu rotary_base
    rotary_interleaved rotary_percent softmax_type swiglu untie_embeddings_and_output_weights use_shared_expert_gate
    window_attn_skip_freq window_size
    """
)
_GONE = _names(
    """
    auto_detect_ckpt_format ckpt_assume_constant_structure ckpt_format ckpt_fully_parallel_load deterministic_mode
    exit_on_missing_checkpoint initialize_embedding load_safetensors log_memory_to_tensorboard log_params_norm
    log_throughput log_timers_to_tensorboard log_validation_ppl_to_tensorboard no_bias_dropout_fusion
    no_log_learning_rate_to_tensorboard transformer_impl
    """
)


def check_flag_names(command_line: Sequence[str]) -> None:
    """Raise one ValueError that names every flag on the command line that ms-swift does not know.

    ms-swift itself looks at them last, and argparse ends at an ambiguous one: --save may be --save_steps.
    """
    known = known_flags()
    typed = dict.fromkeys(
        _name(argument) for argument in command_line if argument.startswith("--") and argument != "--"
    )
    unknown = [name for name in typed if not _is_accepted(name, known)]
    old = [name for name in unknown if _advice_for_old(name) is not None]
    problems = [f"--{name} is a flag of ms-swift 3; {_advice_for_old(name)}" for name in old]
    for name in unknown:
        if name in _ELSEWHERE:
            problems.append(f"--{name} is not a flag of Megatron runs; use {_ELSEWHERE[name]}")
        elif name not in old:
            problems.append(f"--{name} is not a flag{_nearest(name, known)}")
    if problems:
        raise ValueError("\n".join(problems))


def known_flags() -> frozenset[str]:
    """Return the names that the parser creates: --help, one per field, and --no_... for a boolean that is true."""
    names = {"help"}
    for field in fields(AddedFlags):
        names.add(field.name)
        if field.default is True and field.default_factory is MISSING:
            names.add(f"no_{field.name}")
    return frozenset(names)


def _name(argument: str) -> str:
    return argument[2:].split("=", 1)[0].replace("-", "_")


def _is_accepted(name: str, known: Collection[str]) -> bool:
    """Return True for a flag and for an abbreviation of one, as argparse does; a value with a space is not a flag."""
    if name in known or " " in name:
        return True
    return (
        _advice_for_old(name) is None and name not in _ELSEWHERE and sum(flag.startswith(name) for flag in known) == 1
    )


def _advice_for_old(name: str) -> str | None:
    """Return what ms-swift 4 has in place of a flag of ms-swift 3; None if it is not one."""
    if name in RENAMED:
        return f"use --{RENAMED[name]}"
    if name in _CHANGED:
        return f"use {_CHANGED[name]}"
    if name in _FROM_CONFIG:
        return "leave it out, because the model's config.json has the value"
    return "leave it out, because there is nothing to set any more" if name in _GONE else None


def _closest(name: str, known: Collection[str]) -> list[str]:
    """Return the nearest name, and those that are about as near."""
    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.75)
    ratios = [difflib.SequenceMatcher(None, name, flag).ratio() for flag in close]
    return [flag for flag, ratio in zip(close, ratios, strict=True) if ratio > ratios[0] - _AS_NEAR]


def _nearest(name: str, known: Collection[str]) -> str:
    begin_alike = sorted(flag for flag in known if flag.startswith(name))
    close = begin_alike or [flag for flag in sorted(known) if name.startswith(flag) and len(name) == len(flag) + 1]
    close = close or _closest(name, known)
    return f"; did you mean {' or '.join(f'--{flag}' for flag in close[:5])}?" if close else "; leave it out"
