"""The support of every setting of vLLM's EngineArgs in `--vllm_engine_kwargs`: each is in exactly one of two lists.

vLLM reads these settings directly, so one that changes what the engine computes would change the policy that generates
without the trainer's knowledge, and one that a flag sets as well would be overwritten. A contract test compares the
lists with the EngineArgs of the installed vLLM. `swift rollout` refuses the same settings, partly for other reasons.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

FLAG = "vllm_engine_kwargs"


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Settings of speed, memory and logs.
SERVED = _names(
    """
    load_format download_dir safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
    use_tqdm_on_load max_parallel_loading_workers
    kv_cache_dtype kv_cache_dtype_skip_layers calculate_kv_scales kv_cache_memory_bytes num_gpu_blocks_override
    block_size prefix_caching_hash_algo prefix_cache_retention_interval prefix_match_unit
    mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode mamba_backend mamba_ssu_algorithm
    mamba_config enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm gdn_prefill_backend
    kda_prefill_backend kda_decode_backend disable_hybrid_kv_cache_manager kv_offloading_size kv_offloading_backend
    max_num_batched_tokens max_num_scheduled_tokens max_num_active_seqs long_prefill_token_threshold
    long_prefill_token_threshold_adaptive enable_chunked_prefill async_scheduling scheduler_reserve_full_isl
    max_num_partial_prefills max_long_partial_prefills prefill_schedule_interval watermark scheduling_policy
    stream_interval
    compilation_config cudagraph_capture_sizes max_cudagraph_capture_size optimization_level performance_mode
    kernel_config ir_op_priority enable_flashinfer_autotune attention_config attention_backend moe_backend
    linear_backend sparse_indexer_topk_backend use_fp64_gumbel fully_sharded_loras max_cpu_loras
    enable_batch_sharded_sampling enable_shm_tensor_arena sleep_mode_offload_cudagraph
    distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus
    max_logprobs jit_monitor_mode jit_monitor_verbose enable_layerwise_nvtx_tracing profiler_config
    disable_log_stats aggregate_engine_logging logging_config log_level log_config_file enable_logging_iteration_details
    show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces kv_cache_metrics
    kv_cache_metrics_sample custom_histogram_buckets cudagraph_metrics enable_mfu_metrics
    per_request_spec_decode_metrics fail_on_environ_validation shutdown_timeout
    mm_encoder_tp_mode mm_encoder_attn_backend mm_processor_cache_type skip_mm_profiling enable_mm_processor_stats
    """
)

EXPERTS = "enable_return_routed_experts"
SERVED_BY_SERVERS = SERVED | {EXPERTS}  # a trainer with --router_replay_mode R3 requires it of its servers

_FLAGS = {
    "model": "model",
    "dtype": "torch_dtype",
    "seed": "seed",
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "max_model_len": "vllm_max_model_len",
    "max_num_seqs": "vllm_max_num_seqs",
    "enforce_eager": "vllm_enforce_eager",
    "enable_prefix_caching": "vllm_enable_prefix_caching",
    "disable_cascade_attn": "vllm_disable_cascade_attn",
    "limit_mm_per_prompt": "vllm_limit_mm_per_prompt",
    "mm_processor_cache_gb": "vllm_mm_processor_cache_gb",
    "enable_lora": "vllm_enable_lora",
    "max_lora_rank": "lora_rank",
    "enable_sleep_mode": "sleep_level",
    "revision": "model_revision",
    "quantization": "rollout_quantization",
    EXPERTS: "router_replay_mode",
}

_PARALLEL = "an engine is one tensor-parallel group of training ranks; use --vllm_tensor_parallel_size"
_REASONS = {
    "the trainer sends weights of 16 or 32 bits, which vLLM quantizes with --rollout_quantization fp8": """
        quantization_config allow_deprecated_quantization""",
    "the log-probs of draft tokens are not those of the policy, and a draft model receives no weights": """
        speculative_config spec_method spec_model spec_tokens""",
    "weight syncs write to the engine's parameters on the GPU": """
        cpu_offload_gb cpu_offload_params offload_backend offload_group_size offload_num_in_group offload_prefetch_step
        offload_params sleep_preserve_parameter_names enable_cumem_allocator enable_nccl_comm_suspend
        weight_transfer_config pt_load_map_location model_loader_extra_config""",
    _PARALLEL: """
        pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size dcp_comm_backend
        dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_size data_parallel_rank
        data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port
        data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend
        enable_expert_parallel enable_ep_weight_filter all2all_backend enable_elastic_ep elastic_ep_max_dp_size
        enable_eplb eplb_config expert_placement_strategy enable_dbo ubatch_size dbo_decode_token_threshold
        dbo_prefill_token_threshold dp_sync_interval disable_nccl_for_dp_synchronization enable_hc_sp
        distributed_executor_backend master_addr master_port nnodes node_rank device_ids ray_workers_use_nsight
        disable_custom_all_reduce _api_process_count _api_process_rank fault_tolerance_config
        enable_fault_tolerance""",
    "the engine runs the architecture, the code and the tokenizer of --model, as the trainer does": """
        override_attention_dtype
        hf_overrides hf_config_path config_format model_weights model_class_overrides model_impl code_revision
        tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init trust_remote_code hf_token ignore_patterns
        served_model_name runner convert pooler_config additional_config engram_config disable_sliding_window
        io_processor_plugin diffusion_config""",
    "completions are sampled from the policy, with --temperature, --top_p, --top_k and --repetition_penalty": """
        generation_config override_generation_config logits_processors watermark_config structured_outputs_config
        reasoning_parser reasoning_parser_plugin reasoning_config enable_mamba_cache_stochastic_rounding
        mamba_cache_philox_rounds""",
    "the trainer reads the log-probs of the sampled distribution": """
        logprobs_mode kv_sharing_fast_prefill swa_bounded_replay return_sampling_mask""",
    "traces of the engine are not replayed": "enable_trace_replay aux_output_config",
    "the adapter is that of the trainer, with --lora_rank and --vllm_enable_lora": """
        max_loras default_mm_loras lora_dtype lora_target_modules enable_tower_connector_lora specialize_active_lora
        enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels""",
    "the trainer drives the engine's worker and scheduler": "worker_cls worker_extension_cls scheduler_cls",
    "every request of a rollout must be completed by this engine, from its tokens": """
        max_num_queued_reqs max_num_queued_tokens kv_transfer_config kv_events_config ec_transfer_config
        ec_manager_config tokens_only enable_prompt_embeds renderer_num_workers""",
    "the template cuts images, and the engine embeds them as the trainer does": """
        language_model_only enable_mm_embeds interleave_mm_strings media_io_kwargs mm_processor_kwargs
        mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only
        mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
        mm_encoder_fp8_scale_save_margin video_pruning_rate video_pruning_method mm_tensor_ipc
        mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize
        disable_chunked_mm_input allowed_local_media_path allowed_media_domains""",
}
REFUSED: Mapping[str, str] = {name: f"use --{flag}" for name, flag in _FLAGS.items()} | {
    name: why for why, names in _REASONS.items() for name in names.split()
}
# What `swift rollout` calls the same flags, and where an engine is not that of training ranks.
_FLAGS_OF_SERVERS = {
    "max_lora_rank": "vllm_max_lora_rank",
    "data_parallel_size": "vllm_data_parallel_size",
    "enable_expert_parallel": "vllm_enable_expert_parallel",
    "disable_custom_all_reduce": "vllm_disable_custom_all_reduce",
}
_REASONS_OF_SERVERS = {
    _PARALLEL: "a server's engine is parallel by --vllm_tensor_parallel_size and --vllm_data_parallel_size",
    f"use --{_FLAGS['enable_sleep_mode']}": "a server does not share its GPUs with a trainer, so it never sleeps",
}
REFUSED_BY_SERVERS: Mapping[str, str] = {
    name: f"use --{_FLAGS_OF_SERVERS[name]}" if name in _FLAGS_OF_SERVERS else _REASONS_OF_SERVERS.get(why, why)
    for name, why in REFUSED.items()
    if name not in SERVED_BY_SERVERS
}
# Other formats load quantized weights, or shards of another layout.
_LOAD_FORMATS = ("auto", "safetensors", "hf", "pt", "npcache", "dummy", "runai_streamer", "fastsafetensors")


def check_engine_kwargs(
    settings: Mapping[str, Any],
    adapter_only: bool,
    refused: Mapping[str, str] = REFUSED,
    served: frozenset[str] = SERVED,
) -> None:
    """Raise ValueError for settings that are refused or unknown. `adapter_only`: the run sends only its adapter."""
    problems = [f"--{FLAG}: {name}: {_problem(name, refused)}" for name in settings if name not in served]
    if not isinstance(settings.get(EXPERTS, False), bool):
        problems.append(f"--{FLAG}: {EXPERTS} must be true or false, got {settings[EXPERTS]!r}")
    load_format = settings.get("load_format", "auto")
    if load_format not in _LOAD_FORMATS:
        problems.append(
            f"--{FLAG}: load_format {load_format!r} does not load the weights of --model as they are; use one of "
            f"{', '.join(_LOAD_FORMATS)}"
        )
    if load_format == "dummy" and adapter_only:
        problems.append(
            f"--{FLAG}: load_format 'dummy' starts with random weights, and with --vllm_enable_lora true only the "
            "adapter is sent; leave it out, or use --vllm_enable_lora false"
        )
    if settings.get("max_logprobs", 1) == 0:
        problems.append(
            f"--{FLAG}: max_logprobs 0 refuses the log-probs of sampled tokens, which this trainer reads; leave it out"
        )
    if problems:
        raise ValueError("\n".join(problems))


def _problem(name: str, refused: Mapping[str, str]) -> str:
    if name in refused:
        why = refused[name]
        return why if why.startswith("use --") else f"{why}; leave it out"
    return f"vLLM has no such setting, or this package does not support it{_nearest(name, SERVED)}; leave it out"


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""
