"""Every flag of ms-swift is refused, noted, read or without effect, and every help text can be printed."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import MISSING, Field, fields
from typing import Any

import pytest

from swift_megatron_grpo.arguments.refused import NOT_YET, NOTED, READ_WITH, notes_on_flags, refusals
from swift_megatron_grpo.settings.groups import GROUPS


def _flags(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Read by this trainer.
USED_HERE = _flags(
    """
    check check_gpu num_iterations lora_dropout unread_tensors check_attention fast_kernels recompute_elementwise
    mtp_num_layers mtp_loss_scaling_factor mtp_shared_weights
    router_replay_mode ref_tensor_model_parallel_size ref_pipeline_model_parallel_size ref_context_parallel_size
    ref_expert_model_parallel_size ref_expert_tensor_parallel_size virtual_pipeline_model_parallel_size
    microbatch_group_size_per_vp_stage rlhf_type reward_funcs reward_weights bad_reward beta epsilon epsilon_high
    ref_model mcore_ref_model ref_adapters teacher_model teacher_model_type teacher_kl_coef offload_teacher_model
    teacher_model_server teacher_tag_key teacher_prompts sync_ref_model ref_model_sync_steps ref_model_mixup_alpha
    reward_model reward_model_plugin
    _teacher_use_disable_adapter loss_type importance_sampling_level delta tau_pos tau_neg real_tau
    fipo_decay_rate fipo_clip_range fipo_clip_high_only fipo_safety_threshold log_entropy top_entropy_quantile
    scale_rewards kl_in_reward dynamic_sample max_resample_times overlong_filter rollout_importance_sampling_mode
    rollout_importance_sampling_threshold log_rollout_offpolicy_metrics off_policy_sequence_mask_delta temperature
    top_k top_p repetition_penalty stop_words max_completion_length structured_outputs_regex rope_scaling
    max_model_len completion_length_limit_scope micro_batch_size global_batch_size generation_batch_size
    steps_per_generation num_generations num_generations_eval vllm_enable_prefix_caching vllm_gpu_memory_utilization
    vllm_tensor_parallel_size vllm_max_model_len vllm_enforce_eager vllm_limit_mm_per_prompt
    vllm_disable_cascade_attn vllm_max_num_seqs vllm_mm_processor_cache_gb vllm_engine_kwargs rollout_quantization
    sync_check sleep_level offload_optimizer offload_model vllm_server_base_url vllm_server_host vllm_server_port
    vllm_server_timeout vllm_server_group_port vllm_enable_lora vllm_server_api_key async_generate data_seed seed
    train_dataloader_shuffle dataset_shuffle streaming shuffle_buffer_size max_length multi_turn_scheduler max_turns
    use_gym_env gym_env
    vllm_server_pass_dataset resume verify_checkpoint log_completions wandb_log_unique_prompts report_to output_dir
    """
) | {
    field.name for group in GROUPS for field in fields(group) if "flag" in field.metadata and field.name not in NOT_YET
}

# Read by ms-swift's own code, which this trainer runs: parsing, datasets, template, model, optimizer, checkpoints,
# callbacks, and the reward functions of its registry.
USED_BY_SWIFT = _flags(
    """
    model model_type model_revision torch_dtype local_repo_path use_hf hub_token model_kwargs enable_npu_model_patch
    check_model ignore_args_error external_plugins custom_register_path load_args load_data_args
    template system agent_template use_chat_template template_backend response_prefix enable_thinking
    preserve_thinking add_non_thinking_prefix disable_ignore_empty_think
    dataset val_dataset split_dataset_ratio dataset_num_proc load_from_cache_file val_dataset_shuffle interleave_prob
    stopping_strategy download_mode columns strict remove_unused_columns disable_auto_column_mapping
    model_name model_author custom_dataset_info
    adapters freeze_parameters freeze_parameters_regex freeze_parameters_ratio trainable_parameters
    trainable_parameters_regex target_modules target_regex modules_to_save lora_rank lora_alpha lora_dtype use_rslora
    merge_lora
    cosine_min_len_value_wrong cosine_max_len_value_wrong cosine_min_len_value_correct cosine_max_len_value_correct
    cosine_max_len repetition_n_grams repetition_max_penalty soft_max_length soft_cache_length
    recompute_granularity recompute_method recompute_num_layers recompute_modules moe_layer_recompute
    train_iters num_train_epochs
    masked_softmax_fusion bias_dropout_fusion bias_activation_fusion apply_rope_fusion gradient_accumulation_fusion
    cross_entropy_loss_fusion cross_entropy_fusion_impl apply_query_key_layer_scaling attention_softmax_in_fp32
    optimizer_cpu_offload optimizer_offload_fraction use_precision_aware_optimizer main_grads_dtype main_params_dtype
    exp_avg_dtype exp_avg_sq_dtype bf16 accumulate_allreduce_grads_in_fp32
    manual_gc manual_gc_steps manual_gc_eval te_rng_tracker data_parallel_random_init
    lr lr_warmup_init lr_decay_style lr_decay_iters lr_warmup_iters lr_warmup_fraction min_lr lr_wsd_decay_style
    lr_wsd_decay_iters weight_decay weight_decay_incr_style start_weight_decay end_weight_decay clip_grad
    adam_beta1 adam_beta2 adam_eps sgd_momentum apply_wd_to_qk_layernorm
    muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec muon_coefficient_type
    muon_num_ns_steps muon_tp_mode muon_extra_scale_factor muon_scalar_optimizer muon_lr muon_min_lr
    save_steps save_strategy no_save_optim no_save_rng mcore_model mcore_adapter no_load_optim no_load_rng finetune
    perform_initialization use_cpu_initialization async_save save_total_limit metric_for_best_model greater_is_better
    use_persistent_ckpt_worker dist_ckpt_save_pre_mcore_014 dist_ckpt_optim_fully_reshardable
    distrib_optim_fully_reshardable_mem_efficient save_safetensors max_shard_size
    add_version create_checkpoint_symlink
    local_rank ddp_timeout ddp_backend use_distributed_optimizer tensor_model_parallel_size
    pipeline_model_parallel_size pipeline_model_parallel_layout decoder_first_pipeline_num_layers
    decoder_last_pipeline_num_layers
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split overlap_p2p_comm batch_p2p_comm
    overlap_param_gather align_param_gather sequence_parallel context_parallel_size cp_comm_type overlap_grad_reduce
    align_grad_reduce nccl_comm_warmup expert_model_parallel_size expert_tensor_parallel_size
    logging_steps tensorboard_dir tensorboard_queue_size wandb_project wandb_exp_name swanlab_project swanlab_exp_name
    eval_iters eval_steps callbacks
    freeze_llm freeze_vit freeze_aligner language_model_only vit_attn_impl vit_gradient_checkpointing
    vit_gradient_checkpointing_kwargs vit_lr aligner_lr max_pixels norm_bbox
    moe_router_load_balancing_type moe_router_dtype moe_token_dispatcher_type moe_enable_deepep moe_grouped_gemm
    moe_permute_fusion moe_aux_loss_coeff moe_z_loss_coeff moe_shared_expert_overlap moe_expert_capacity_factor
    moe_pad_expert_input_to_capacity moe_token_drop_policy
    dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss apply_dsa_kernel_fusion csa_dense_mode use_fused_mhc
    mhc_recompute_layer_num engram_tokenizer_map linear_decoupled_in_proj megatron_extra_kwargs
    """
)

# No effect: flags of other training types or engines, which ms-swift's own GRPO does not read either; flags that refine
# one that NOT_YET refuses; flags that tune the worker processes of a data loader.
NO_EFFECT = _flags(
    """
    rpo_alpha reference_free label_smoothing f_divergence_type desirable_weight undesirable_weight calculate_KL
    center_rewards_coefficient gkd_logits_topk lmbda seq_kd sft_alpha enable_dft_loss enable_channel_loss mrl_dims
    num_labels problem_type max_new_tokens num_beams stream logprobs top_logprobs use_swift_lora
    decision_drop_instructions decision_subsample_options decision_state_as_text decision_shuffle_fields
    attn_impl experts_impl device_map max_memory init_strategy
    padding_side sequence_parallel_size lazy_tokenize

    packing_length packing_num_proc packing_strategy
    hqq_axis bnb_4bit_compute_dtype bnb_4bit_quant_type bnb_4bit_use_double_quant bnb_4bit_quant_storage
    fp8_recipe fp8_amax_history_len fp8_amax_compute_algo fp4_recipe strict_fsdp_dtensor_load
    data_parallel_sharding_strategy

    dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context
    """
)


def default_of(field: Field[Any]) -> Any:
    return field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]


def test_every_flag_is_in_exactly_one_list() -> None:
    from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments

    lists = {
        "NOT_YET": set(NOT_YET),
        "NOTED": set(NOTED),
        "USED_HERE": USED_HERE,
        "USED_BY_SWIFT": USED_BY_SWIFT,
        "NO_EFFECT": NO_EFFECT,
    }
    places = Counter(flag for flags in lists.values() for flag in flags)
    flags = {field.name for field in fields(GRPOArguments)}
    assert flags - set(places) == set(), "flags in none of the lists"
    assert set(places) - flags == set(), "listed, but not flags"
    assert {flag for flag, count in places.items() if count > 1} == set(), "in several lists"


def test_defaults_are_neither_refused_nor_noted() -> None:
    from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments

    defaults = {field.name: default_of(field) for field in fields(GRPOArguments)}
    assert list(refusals(defaults)) == []
    assert notes_on_flags(defaults, defaults) == []


@pytest.mark.parametrize(("needed", "is_read", "names"), READ_WITH, ids=[needed for needed, *_ in READ_WITH])
def test_flags_that_this_run_does_not_read_are_noted(needed: str, is_read: Any, names: str) -> None:
    from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments

    defaults = {field.name: default_of(field) for field in fields(GRPOArguments)}
    flag, _, value = needed.removeprefix("--").partition(" or ")[0].partition(" ")
    without = {**defaults, flag: [] if isinstance(defaults[flag], list) else 0 if flag == "beta" else None}
    typed = {"above 0": 0.1, "true": True, "": 0.5}.get(value, [value] if isinstance(defaults[flag], list) else value)
    for name in names.split():
        note = f"--{name} 7: without effect, because only a run with {needed} reads it"
        assert note in notes_on_flags({**without, name: 7}, defaults)
        assert note not in notes_on_flags({**without, flag: typed, name: 7}, defaults)


def flags_of_this_package() -> dict[str, str]:
    """Return the help texts of the flags beyond ms-swift's."""
    from swift.megatron.arguments import MegatronRLHFArguments

    from swift_megatron_grpo.arguments.derived import AddedFlags

    stock = {field.name for field in fields(MegatronRLHFArguments)}
    return {field.name: field.metadata["help"] for field in fields(AddedFlags) if field.name not in stock}


def test_flags_of_this_package_have_help() -> None:
    helps = flags_of_this_package()
    assert {"bad_reward", "max_tokens_per_micro_batch", "offload_grad", "kl_estimator", "entropy_coef"} <= set(helps)
    assert set(helps) <= USED_HERE | set(NOT_YET)
    assert all(len(text) > 40 and "Default: " in text for text in helps.values())


def test_every_help_text_formats_under_argparse() -> None:
    """A bare percent sign in one of them would make --help fail for all flags."""
    for flag, text in flags_of_this_package().items():
        parser = argparse.ArgumentParser()
        parser.add_argument(f"--{flag}", help=text)
        assert f"--{flag}" in parser.format_help()


def test_the_help_of_all_flags_can_be_printed() -> None:
    """The same for the whole class, with the parser that ms-swift uses."""
    from transformers import HfArgumentParser

    from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments

    printed = HfArgumentParser([GRPOArguments]).format_help()
    assert all(f"--{flag}" in printed for flag in flags_of_this_package())
