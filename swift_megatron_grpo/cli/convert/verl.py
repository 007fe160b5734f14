"""Keys of verl and siiRL: key=value words after `python3 -m verl.trainer.main_ppo`, or YAML."""

from __future__ import annotations

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

_MODEL, _ACTOR, _ROLLOUT, _REF = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout", "ref"))
_CRITIC = Needless("GRPO has no critic")
_OWN = Needless("chosen by this trainer")

_REFERENCE_SIZES = [
    f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
]
_LOSSES = values_of("loss_type", "token-mean:dapo seq-mean-token-mean:grpo seq-mean-token-sum-norm:dr_grpo")
_POLICY_LOSSES = choice(
    {"vanilla": {}, "gspo": {"importance_sampling_level": "sequence"}, "cispo": {"loss_type": "cispo"}}
)


def _when_true(flag: str) -> Rule:
    return Computed([flag], lambda value: {flag: value} if value else {})


def _loss(settings: Mapping[str, Any]) -> Flags:
    aggregation = _LOSSES.rule(settings[f"{_ACTOR}.loss_agg_mode"])
    mode = settings[f"{_ACTOR}.policy_loss.loss_mode"]
    bound = {"dual_clip": settings[f"{_ACTOR}.clip_ratio_c"]} if mode == "vanilla" else {}
    return {**aggregation, **_POLICY_LOSSES.rule(mode), **bound}


def _clip(settings: Mapping[str, Any]) -> Flags:
    """Return both bounds: clip_ratio counts where the two others are not set."""
    both = settings.get(f"{_ACTOR}.clip_ratio", 0.2)
    low, high = (settings.get(f"{_ACTOR}.clip_ratio_{side}", both) for side in ("low", "high"))
    return bounds(low, high)


def _kl(settings: Mapping[str, Any]) -> Flags:
    in_loss, in_reward = settings[f"{_ACTOR}.use_kl_loss"], settings["algorithm.use_kl_in_reward"]
    if in_loss and in_reward:
        raise NoCounterpart("the KL term is in the loss or in the reward here, not in both")
    if in_reward:
        return {"beta": settings.get("algorithm.kl_ctrl.kl_coef", 0.001), "kl_in_reward": True}
    beta = settings.get(f"{_ACTOR}.kl_loss_coef", 0.001) if in_loss else 0
    return {"beta": beta, "kl_in_reward": False}


def _batches(settings: Mapping[str, Any]) -> Flags:
    """Count completions: verl counts prompts."""
    size = whole(settings[f"{_ROLLOUT}.n"])
    prompts, per_step = whole(settings["data.train_batch_size"]), whole(settings[f"{_ACTOR}.ppo_mini_batch_size"])
    rollout = {} if prompts == per_step else {"generation_batch_size": prompts * size}
    return {"num_generations": size, "global_batch_size": per_step * size, **rollout}


def _micro_batches(settings: Mapping[str, Any]) -> Flags:
    if settings[f"{_ACTOR}.use_dynamic_bsz"]:
        return {"max_tokens_per_micro_batch": settings[f"{_ACTOR}.ppo_max_token_len_per_gpu"]}
    return {"micro_batch_size": settings.get(f"{_ACTOR}.ppo_micro_batch_size_per_gpu")}


def _inference(settings: Mapping[str, Any]) -> Flags:
    if settings.get(f"{_ROLLOUT}.log_prob_use_dynamic_bsz"):
        return {"infer_max_tokens_per_micro_batch": settings.get(f"{_ROLLOUT}.log_prob_max_token_len_per_gpu")}
    return {"infer_batch_size": settings.get(f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu")}


def _adapter(settings: Mapping[str, Any]) -> Flags:
    rank = settings.get(f"{_MODEL}.lora_rank") or settings.get(f"{_MODEL}.lora.rank")
    if not rank:
        return {"tuner_type": "full"}
    alpha = settings.get(f"{_MODEL}.lora_alpha") or settings.get(f"{_MODEL}.lora.alpha")
    return {"tuner_type": "lora", "lora_rank": rank, "lora_alpha": alpha, "target_modules": "all-linear"}


def _reference(settings: Mapping[str, Any]) -> Flags:
    """Return the sizes of the reference that differ from the policy's."""
    if not any(settings[key] for key in (f"{_ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward")):
        return {}
    sizes = {name: settings.get(f"{_REF}.megatron.{name}") for name in _REFERENCE_SIZES}
    of_policy = {name: settings.get(f"{_ACTOR}.megatron.{name}", 1) for name in _REFERENCE_SIZES}
    return {f"ref_{name}": size for name, size in sizes.items() if size is not None and size != of_policy[name]}


def _sequence_parallel(settings: Mapping[str, Any]) -> Flags:
    shared = settings.get(f"{_ACTOR}.megatron.tensor_model_parallel_size", 1) != 1
    return {"sequence_parallel": True} if shared and settings[f"{_ACTOR}.megatron.sequence_parallel"] else {}


def _trackers(value: Any) -> Flags:
    names = value if isinstance(value, list) else [value]
    return {"report_to": [name for name in names if name != "console"] or None}


def _engine_memory(settings: Mapping[str, Any]) -> Flags:
    """verl frees vLLM's cache and offloads its weights between rollouts."""
    return {"sleep_level": 1 if settings[f"{_ROLLOUT}.free_cache_engine"] else 0}


_COLUMNS = '{"prompt":"messages"}'  # verl's default name of the conversation, and this package's

_RULES: dict[str, Rule] = {
    # data
    "data.train_files": Computed(["dataset", "columns"], lambda value: {"dataset": value, "columns": _COLUMNS}),
    **flags("data.", """
        val_files:val_dataset max_prompt_length:max_length max_response_length:max_completion_length seed:data_seed"""),
    "data.shuffle": Computed(
        ["dataset_shuffle", "train_dataloader_shuffle"],
        lambda value: {"dataset_shuffle": value, "train_dataloader_shuffle": value},
    ),
    "data.truncation": choice(
        {"error": {"truncation_strategy": "raise"}, "left": {"truncation_strategy": "left"}},
        "prompts are cut at their beginning, left out or refused here",
    ),
    "data.filter_overlong_prompts": choice({"true": {"truncation_strategy": "delete"}, "false": {}}),
    "data.prompt_key": ByHand("put it into --columns in place of `prompt`"),
    "data.reward_fn_key": ByHand("reward functions get every column of the dataset"),
    "data.custom_cls.*": ByHand("register the dataset with --external_plugins"),
    "data.image_key": ByHand("rename the column to `images`, or use --columns"),
    **each("data.", "return_* *workers", _OWN),
    "custom_reward_function.*": ByHand(
        "write a reward class (docs of ms-swift: ORM), --external_plugins and --reward_funcs"
    ),
    "reward_model.reward_manager": ByHand("choose --reward_funcs"),
    "reward_model.enable": choice({"false": {}}, "there are no reward models as Ray workers"),
    "reward_model.overlong_buffer.*": ByHand(
        "--reward_funcs ... soft_overlong, with --soft_max_length and --soft_cache_length"
    ),
    # model
    f"{_MODEL}.path": "model",
    f"{_MODEL}.use_remove_padding": Needless("sequences are always packed"),
    f"{_MODEL}.use_fused_kernels": Needless("--fast_kernels is on by default"),
    f"{_MODEL}.enable_gradient_checkpointing": choice(
        {
            "true": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
            "false": {},
        }
    ),
    # actor
    **flags(f"{_ACTOR}.", """
        grad_clip:clip_grad entropy_coeff:entropy_coef ppo_epochs:num_iterations freeze_vision_tower:freeze_vit
        checkpoint.async_save:async_save"""),
    **flags(f"{_ACTOR}.megatron.", """
        tensor_model_parallel_size expert_model_parallel_size expert_tensor_parallel_size pipeline_model_parallel_size
        virtual_pipeline_model_parallel_size context_parallel_size use_distributed_optimizer seed dtype:torch_dtype
        param_dtype:torch_dtype"""),
    **flags(f"{_ACTOR}.megatron.override_transformer_config.", """
        recompute_granularity recompute_modules recompute_method recompute_num_layers attention_backend moe_grouped_gemm
        moe_permute_fusion moe_router_dtype moe_token_dispatcher_type moe_shared_expert_overlap moe_aux_loss_coeff
        moe_z_loss_coeff"""),
    **flags(f"{_ACTOR}.optim.", """
        lr weight_decay clip_grad optimizer lr_decay_style min_lr lr_warmup_init weight_decay_incr_style
        lr_wsd_decay_style"""),
    f"{_ACTOR}.megatron.param_offload": _when_true("offload_model"),
    f"{_ACTOR}.megatron.grad_offload": _when_true("offload_grad"),
    f"{_ACTOR}.megatron.optimizer_offload": _when_true("offload_optimizer"),
    **each(f"{_ACTOR}.megatron.", "use_mbridge vanilla_mbridge *dist_checkpointing*",
           Needless("mcore-bridge loads and saves checkpoints of Hugging Face")),
    f"{_ACTOR}.optim.betas": Computed(
        ["adam_beta1", "adam_beta2"], lambda value: {"adam_beta1": value[0], "adam_beta2": value[1]}
    ),
    f"{_ACTOR}.optim.lr_warmup_steps": when_positive("lr_warmup_iters"),
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": when_positive("lr_warmup_fraction"),
    f"{_ACTOR}.strategy": choice({"megatron": {}, "fsdp": {}, "fsdp2": {}}),
    f"{_ACTOR}.kl_loss_type": values_of("kl_estimator", "kl:k1 k1 abs mse:k2 k2 low_var_kl:k3 k3"),
    f"{_ACTOR}.fsdp_config.*": Needless("Megatron's distributed optimizer shards the states; set the layout by hand"),
    f"{_ACTOR}.ulysses_sequence_parallel_size": ByHand("use --context_parallel_size"),
    **each(f"{_ACTOR}.", "use_torch_compile load_weight checkpoint.*", _OWN),
    # rollout
    f"{_ROLLOUT}.name": choice({"vllm": {}, "sglang": {}, "hf": {}}),
    f"{_ROLLOUT}.mode": choice({"sync": {}, "async": {}}),
    **flags(f"{_ROLLOUT}.", """
        temperature top_p top_k gpu_memory_utilization:vllm_gpu_memory_utilization
        tensor_model_parallel_size:vllm_tensor_parallel_size enforce_eager:vllm_enforce_eager
        max_model_len:vllm_max_model_len max_num_seqs:vllm_max_num_seqs
        enable_prefix_caching:vllm_enable_prefix_caching val_kwargs.n:num_generations_eval
        val_kwargs.temperature:eval_temperature val_kwargs.top_p:eval_top_p"""),
    **each(f"{_ROLLOUT}.", """
        enable_chunked_prefill max_num_batched_tokens load_format dtype layered_summon calculate_log_probs""", _OWN),
    **each(f"{_ROLLOUT}.", "multi_turn.* agent.*",
           ByHand("see docs/multi_turn.md: --multi_turn_scheduler and --max_turns")),
    # reference
    f"{_REF}.log_prob_*": Needless("the reference takes --infer_max_tokens_per_micro_batch or --infer_batch_size"),
    f"{_REF}.megatron.*": Needless("the reference has the layout of the policy, but for --ref_* sizes"),
    f"{_REF}.fsdp_config.*": Needless("the reference is offloaded with --offload_model true"),
    f"{_REF}.*": _OWN,
    # algorithm
    "algorithm.adv_estimator": values_of("advantage_estimator", """
        grpo rloo reinforce_plus_plus:reinforce_plus_plus_plain reinforce_plus_plus_baseline:reinforce_plus_plus""",
                                         "it needs a critic, or is not known here"),
    "algorithm.norm_adv_by_std_in_grpo": choice(
        {"true": {"scale_rewards": "group"}, "false": {"scale_rewards": "none"}}
    ),
    "algorithm.kl_ctrl.type": choice({"fixed": {}}, "use --kl_target and --kl_horizon"),
    "algorithm.filter_groups.enable": "dynamic_sample",
    "algorithm.filter_groups.max_num_gen_batches": when_positive("max_resample_times"),
    "algorithm.filter_groups.metric": Needless("groups of equal rewards are replaced"),
    "algorithm.gamma": choice({"1": {}, "1.0": {}}, "advantages are not discounted here"),
    **each("", "algorithm.lam critic.* trainer.critic_warmup", _CRITIC),
    # trainer
    **flags("trainer.", """
        total_epochs:num_train_epochs max_actor_ckpt_to_keep:save_total_limit default_local_dir:output_dir
        n_gpus_per_node:NPROC_PER_NODE nnodes:NNODES project_name:wandb_project experiment_name:wandb_exp_name
        rollout_data_dir:rollout_dump val_before_train:eval_before_train"""),
    "trainer.total_training_steps": when_positive("train_iters"),
    "trainer.save_freq": when_positive("save_steps"),
    "trainer.test_freq": when_positive("eval_steps"),
    "trainer.logger": Computed(["report_to"], _trackers),
    "trainer.resume_mode": ByHand("to continue from a checkpoint: --resume auto, or --resume FOLDER"),
    "trainer.balance_batch": Needless("every data-parallel rank gets the same work"),
    **each("", "trainer.ray_* ray_kwargs.* ray_init.*", Needless("torchrun starts the ranks, without Ray")),
    **each("", f"trainer.device {_MODEL}.trust_remote_code {_MODEL}.use_shm *._target_ *.profiler.* global_profiler.* "
           "hydra.*", _OWN),
}  # fmt: skip


VERL = Table(
    "verl",
    ("actor_rollout_ref.",),
    _RULES,
    defaults={
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": True,
        "algorithm.use_kl_in_reward": False,
        f"{_ACTOR}.use_kl_loss": False,
        f"{_ACTOR}.megatron.sequence_parallel": True,
        f"{_ACTOR}.loss_agg_mode": "token-mean",
        f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
        f"{_ACTOR}.clip_ratio_c": 3.0,
        f"{_ACTOR}.use_dynamic_bsz": False,
        f"{_ACTOR}.ppo_max_token_len_per_gpu": 16384,
        f"{_ACTOR}.ppo_mini_batch_size": 256,
        f"{_ACTOR}.optim.lr": 1e-6,
        f"{_ACTOR}.optim.lr_decay_style": "constant",
        f"{_ACTOR}.optim.weight_decay": 0.01,
        f"{_ACTOR}.optim.betas": [0.9, 0.999],
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        f"{_ROLLOUT}.n": 1,
        f"{_ROLLOUT}.temperature": 1.0,
        f"{_ROLLOUT}.gpu_memory_utilization": 0.5,
        f"{_ROLLOUT}.tensor_model_parallel_size": 2,
        f"{_ROLLOUT}.free_cache_engine": True,
    },
    together=(
        Together(("data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size", f"{_ROLLOUT}.n"),
                 ("num_generations", "global_batch_size", "generation_batch_size"), _batches),
        Together((f"{_ACTOR}.use_dynamic_bsz", f"{_ACTOR}.ppo_max_token_len_per_gpu",
                  f"{_ACTOR}.ppo_micro_batch_size_per_gpu"),
                 ("max_tokens_per_micro_batch", "micro_batch_size"), _micro_batches),
        Together((f"{_ROLLOUT}.log_prob_use_dynamic_bsz", f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
                  f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
                 ("infer_max_tokens_per_micro_batch", "infer_batch_size"), _inference),
        Together((f"{_ACTOR}.loss_agg_mode", f"{_ACTOR}.policy_loss.loss_mode", f"{_ACTOR}.clip_ratio_c"),
                 ("loss_type", "importance_sampling_level", "dual_clip"), _loss),
        Together((f"{_ACTOR}.clip_ratio", f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio_high"),
                 ("epsilon", "epsilon_high"), _clip),
        Together((f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.kl_loss_coef", "algorithm.use_kl_in_reward",
                  "algorithm.kl_ctrl.kl_coef"), ("beta", "kl_in_reward"), _kl),
        Together((f"{_MODEL}.lora_rank", f"{_MODEL}.lora_alpha", f"{_MODEL}.lora.rank", f"{_MODEL}.lora.alpha"),
                 ("tuner_type", "lora_rank", "lora_alpha", "target_modules"), _adapter),
        Together((f"{_ROLLOUT}.free_cache_engine",), ("sleep_level",), _engine_memory),
        Together((f"{_ACTOR}.megatron.sequence_parallel",), ("sequence_parallel",), _sequence_parallel),
        Together(tuple(f"{_REF}.megatron.{name}" for name in _REFERENCE_SIZES),
                 tuple(f"ref_{name}" for name in _REFERENCE_SIZES), _reference),
    ),
)  # fmt: skip
