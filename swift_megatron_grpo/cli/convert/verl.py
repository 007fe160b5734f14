"""Keys of verl and siiRL: key=value words after `python3 -m verl.trainer.main_ppo`, or YAML."""

from __future__ import annotations

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
    micro_batches,
    together,
    values_of,
    when_positive,
    whole,
)

_MODEL, _ACTOR, _ROLLOUT, _REF = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout", "ref"))
_KL_IN_LOSS, _KL_IN_REWARD = f"{_ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
_OWN = Needless("chosen by this trainer")
_REFERENCE_SIZES = [
    f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
]
_LOSSES = values_of("loss_type", "token-mean:dapo seq-mean-token-mean:grpo seq-mean-token-sum-norm:dr_grpo")
_POLICY_LOSSES = choice(
    {"vanilla": {}, "gspo": {"importance_sampling_level": "sequence"}, "cispo": {"loss_type": "cispo"}}
)


def _loss(aggregation: Any, mode: Any, bound: Any) -> Flags:
    dual_clip = {"dual_clip": bound} if mode == "vanilla" else {}
    return {**_LOSSES.rule(aggregation), **_POLICY_LOSSES.rule(mode), **dual_clip}


def _kl(in_loss: Any, in_reward: Any, of_loss: Any = 0.001, of_reward: Any = 0.001) -> Flags:
    if in_loss and in_reward:
        raise NoCounterpart("the KL term is in the loss or in the reward here, not in both")
    if in_reward:
        return {"beta": of_reward, "kl_in_reward": True}
    return {"beta": of_loss if in_loss else 0, "kl_in_reward": False}


def _batches(rollout: Any, step: Any, group: Any) -> Flags:
    """Count completions: verl counts prompts."""
    size = whole(group)
    return batch_sizes(size, whole(step) * size, whole(rollout) * size)


def _inference(dynamic: Any = False, tokens: Any = None, count: Any = None) -> Flags:
    return {"infer_max_tokens_per_micro_batch": tokens} if dynamic else {"infer_batch_size": count}


def _adapter(rank: Any = None, alpha: Any = None, nested_rank: Any = None, nested_alpha: Any = None) -> Flags:
    if not (rank or nested_rank):
        return {"tuner_type": "full"}
    sizes = {"lora_rank": rank or nested_rank, "lora_alpha": alpha or nested_alpha}
    return {"tuner_type": "lora", **sizes, "target_modules": "all-linear"}


def _reference(in_loss: Any, in_reward: Any, **sizes: Any) -> Flags:
    """Return the sizes of the reference that differ from the policy's."""
    own = {name: sizes[name] for name in _REFERENCE_SIZES if name in sizes and (in_loss or in_reward)}
    return {f"ref_{name}": size for name, size in own.items() if size != sizes.get(f"policy_{name}", 1)}


def _trackers(value: Any) -> Flags:
    names = value if isinstance(value, list) else [value]
    return {"report_to": [name for name in names if name != "console"] or None}


_COLUMNS = '{"prompt":"messages"}'  # verl's default name of the conversation, and this package's

_RULES: dict[str, Rule] = {
    # data
    "data.train_files": Computed(["dataset", "columns"], lambda value: {"dataset": value, "columns": _COLUMNS}),
    **flags("data.", """
        val_files:val_dataset max_prompt_length:max_length max_response_length:max_completion_length seed:data_seed"""),
    "data.shuffle": "dataset_shuffle train_dataloader_shuffle",
    "data.truncation": values_of("truncation_strategy", "error:raise left",
                                 "prompts are cut at their beginning, left out or refused here"),
    "data.filter_overlong_prompts": values_of("truncation_strategy", "true:delete false:"),
    "data.prompt_key": ByHand("put it into --columns in place of `prompt`"),
    "data.reward_fn_key": ByHand("reward functions get every column of the dataset"),
    "data.custom_cls.*": ByHand("register the dataset with --external_plugins"),
    "data.image_key": ByHand("rename the column to `images`, or use --columns"),
    **each("data.", "return_* *workers", _OWN),
    "custom_reward_function.*":
        ByHand("write a reward class (docs of ms-swift: ORM), --external_plugins and --reward_funcs"),
    "reward_model.reward_manager": ByHand("choose --reward_funcs"),
    "reward_model.enable": choice({"false": {}}, "there are no reward models as Ray workers"),
    "reward_model.overlong_buffer.*":
        ByHand("--reward_funcs ... soft_overlong, with --soft_max_length and --soft_cache_length"),
    # model
    f"{_MODEL}.path": "model",
    f"{_MODEL}.use_remove_padding": Needless("sequences are always packed"),
    f"{_MODEL}.use_fused_kernels": Needless("--fast_kernels is on by default"),
    f"{_MODEL}.enable_gradient_checkpointing": choice({
        "true": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        "false": {},
    }),
    # actor
    **flags(f"{_ACTOR}.", """
        grad_clip:clip_grad entropy_coeff:entropy_coef ppo_epochs:num_iterations freeze_vision_tower:freeze_vit
        checkpoint.async_save:async_save"""),
    **flags(f"{_ACTOR}.megatron.", """
        tensor_model_parallel_size expert_model_parallel_size expert_tensor_parallel_size pipeline_model_parallel_size
        virtual_pipeline_model_parallel_size context_parallel_size use_distributed_optimizer seed dtype:torch_dtype
        param_dtype:torch_dtype param_offload:offload_model grad_offload:offload_grad
        optimizer_offload:offload_optimizer"""),
    **flags(f"{_ACTOR}.megatron.override_transformer_config.", """
        recompute_granularity recompute_modules recompute_method recompute_num_layers attention_backend moe_grouped_gemm
        moe_permute_fusion moe_router_dtype moe_token_dispatcher_type moe_shared_expert_overlap moe_aux_loss_coeff
        moe_z_loss_coeff"""),
    **flags(f"{_ACTOR}.optim.", """
        lr weight_decay clip_grad optimizer lr_decay_style min_lr lr_warmup_init weight_decay_incr_style
        lr_wsd_decay_style"""),
    **each(f"{_ACTOR}.megatron.", "use_mbridge vanilla_mbridge *dist_checkpointing*",
           Needless("mcore-bridge loads and saves checkpoints of Hugging Face")),
    f"{_ACTOR}.optim.betas":
        Computed(["adam_beta1", "adam_beta2"], lambda value: {"adam_beta1": value[0], "adam_beta2": value[1]}),
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
    "algorithm.norm_adv_by_std_in_grpo": values_of("scale_rewards", "true:group false:none"),
    "algorithm.kl_ctrl.type": choice({"fixed": {}}, "use --kl_target and --kl_horizon"),
    "algorithm.filter_groups.enable": "dynamic_sample",
    "algorithm.filter_groups.max_num_gen_batches": when_positive("max_resample_times"),
    "algorithm.filter_groups.metric": Needless("groups of equal rewards are replaced"),
    "algorithm.gamma": choice({"1": {}, "1.0": {}}, "advantages are not discounted here"),
    **each("", "algorithm.lam critic.* trainer.critic_warmup", Needless("GRPO has no critic")),
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
        "algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": True, _KL_IN_REWARD: False,
        _KL_IN_LOSS: False, f"{_ACTOR}.loss_agg_mode": "token-mean", f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
        f"{_ACTOR}.clip_ratio_c": 3.0, f"{_ACTOR}.megatron.sequence_parallel": True,
        f"{_ACTOR}.use_dynamic_bsz": False, f"{_ACTOR}.ppo_max_token_len_per_gpu": 16384,
        f"{_ACTOR}.ppo_mini_batch_size": 256, f"{_ACTOR}.optim.lr": 1e-6, f"{_ACTOR}.optim.lr_decay_style": "constant",
        f"{_ACTOR}.optim.weight_decay": 0.01, f"{_ACTOR}.optim.betas": [0.9, 0.999],
        "data.train_batch_size": 1024, "data.max_prompt_length": 512, "data.max_response_length": 512,
        f"{_ROLLOUT}.n": 1, f"{_ROLLOUT}.temperature": 1.0, f"{_ROLLOUT}.gpu_memory_utilization": 0.5,
        f"{_ROLLOUT}.tensor_model_parallel_size": 2, f"{_ROLLOUT}.free_cache_engine": True,
    },
    together=(
        together(_batches, "num_generations global_batch_size generation_batch_size", rollout="data.train_batch_size",
                 step=f"{_ACTOR}.ppo_mini_batch_size", group=f"{_ROLLOUT}.n"),
        together(micro_batches, "max_tokens_per_micro_batch micro_batch_size", dynamic=f"{_ACTOR}.use_dynamic_bsz",
                 tokens=f"{_ACTOR}.ppo_max_token_len_per_gpu", count=f"{_ACTOR}.ppo_micro_batch_size_per_gpu"),
        together(_inference, "infer_max_tokens_per_micro_batch infer_batch_size",
                 dynamic=f"{_ROLLOUT}.log_prob_use_dynamic_bsz", tokens=f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
                 count=f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
        together(_loss, "loss_type importance_sampling_level dual_clip", aggregation=f"{_ACTOR}.loss_agg_mode",
                 mode=f"{_ACTOR}.policy_loss.loss_mode", bound=f"{_ACTOR}.clip_ratio_c"),
        together(clip, "epsilon epsilon_high", both=f"{_ACTOR}.clip_ratio", low=f"{_ACTOR}.clip_ratio_low",
                 high=f"{_ACTOR}.clip_ratio_high"),
        together(_kl, "beta kl_in_reward", in_loss=_KL_IN_LOSS, of_loss=f"{_ACTOR}.kl_loss_coef",
                 in_reward=_KL_IN_REWARD, of_reward="algorithm.kl_ctrl.kl_coef"),
        together(_adapter, "tuner_type lora_rank lora_alpha target_modules", rank=f"{_MODEL}.lora_rank",
                 alpha=f"{_MODEL}.lora_alpha", nested_rank=f"{_MODEL}.lora.rank", nested_alpha=f"{_MODEL}.lora.alpha"),
        # verl frees vLLM's cache and offloads its weights between rollouts.
        together(lambda on: {"sleep_level": 1 if on else 0}, "sleep_level", on=f"{_ROLLOUT}.free_cache_engine"),
        together(lambda on, size=1: {"sequence_parallel": True} if on and size != 1 else {}, "sequence_parallel",
                 on=f"{_ACTOR}.megatron.sequence_parallel",
                 reads={"size": f"{_ACTOR}.megatron.tensor_model_parallel_size"}),
        together(_reference, " ".join(f"ref_{name}" for name in _REFERENCE_SIZES),
                 **{name: f"{_REF}.megatron.{name}" for name in _REFERENCE_SIZES},
                 reads={"in_loss": _KL_IN_LOSS, "in_reward": _KL_IN_REWARD,
                        **{f"policy_{name}": f"{_ACTOR}.megatron.{name}" for name in _REFERENCE_SIZES}}),
    ),
)  # fmt: skip
