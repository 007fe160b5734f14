"""The table of verl and siiRL.

They have key=value words after `python3 -m verl.trainer.main_ppo`, or YAML.
"""

import json
from functools import partial
from typing import Any

from swift_megatron_grpo.cli.convert.rules import (
    BALANCED,
    CRITIC,
    OWN,
    RESUME,
    REWARD_CLASS,
    REWARD_MODEL,
    TURNS,
    adapter,
    batch_sizes,
    clip,
    kl,
    micro_batches,
)
from swift_megatron_grpo.cli.convert.tables import (
    ByHand,
    Computed,
    Flags,
    Needless,
    Table,
    Together,
    choice,
    each,
    flags,
    text_of,
    values_of,
    when_positive,
    whole,
)

_MODEL, _ACTOR, _ROLLOUT, _REF = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout", "ref"))
_KL_IN_LOSS, _KL_IN_REWARD = f"{_ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
_REFERENCE_SIZES = [
    f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
]
_LOSSES = values_of(
    "loss_type", "token-mean:dapo seq-mean-token-mean:grpo seq-mean-token-sum:luspo seq-mean-token-sum-norm:dr_grpo"
)
_ESTIMATORS = values_of(
    "advantage_estimator",
    "grpo rloo reinforce_plus_plus:reinforce_plus_plus_plain reinforce_plus_plus_baseline:reinforce_plus_plus",
    "it needs a critic, or is not known here",
)
_KL_ESTIMATORS = values_of("kl_estimator", "kl:k1 k1 abs mse:k2 k2 low_var_kl:k3 k3")
_TRUNCATION = values_of(
    "truncation_strategy", "error:raise left", "prompts are cut at their beginning, left out or refused here"
)
_POLICY_LOSSES = choice({
    "vanilla": {}, "gspo": {"importance_sampling_level": "sequence"}, "cispo": {"loss_type": "cispo"},
    "dppo_tv": {"loss_type": "dppo_tv"}, "dppo_kl": {"loss_type": "dppo_kl"},
})  # fmt: skip


def _loss(aggregation: Any, mode: Any, bound: Any) -> Flags:
    """Return the loss. verl averages GSPO over completions, whatever the aggregation is."""
    dual_clip = {"dual_clip": bound} if mode == "vanilla" else {}
    average = {"loss_type": "grpo"} if mode == "gspo" else _LOSSES.rule(aggregation)
    return {**average, **_POLICY_LOSSES.rule(mode), **dual_clip}


def _clip_of_verl(mode: Any, both: Any, low: Any = None, high: Any = None) -> Flags:
    """Return the bounds. verl's CISPO bounds weights at 1 + clip_ratio_high; here --epsilon_high is that bound."""
    if mode == "cispo":
        return {"epsilon_high": 1 + (both if high is None else high)}
    return clip(both, low, high)


def _advantages(estimator: Any, by_std: Any = True) -> Flags:
    """Return estimator and scale: norm_adv_by_std_in_grpo is of grpo alone, and REINFORCE++ scales over the batch."""
    scale = {"rloo": "none", "grpo": "group" if by_std else "none"}.get(text_of(estimator), "batch")
    return {**_ESTIMATORS.rule(estimator), "scale_rewards": scale}


def _kl_estimator(in_reward: Any, of_reward: Any, of_loss: Any = None) -> Flags:
    """Return the estimator of the KL where it is: verl has one for the loss and one for the reward."""
    used = of_reward if in_reward else of_loss
    return {} if used is None else _KL_ESTIMATORS.rule(used)


def _columns(prompt: Any, images: Any = "images") -> Flags:
    """Return the columns of verl's rows, as rewards and preprocessors of ms-swift call them."""
    columns = {prompt: "messages", images: "images", "reward_model.ground_truth": "solution"}
    return {"columns": json.dumps({column: name for column, name in columns.items() if column != name})}


def _long_prompts(filtered: Any = False, truncation: Any = None) -> Flags:
    """Return what becomes of prompts that are too long. verl truncates what its filter has left."""
    return {"truncation_strategy": "delete"} if text_of(filtered) == "true" else _TRUNCATION.rule(truncation)


def _inference(dynamic: Any = False, tokens: Any = None, count: Any = None) -> Flags:
    return {"infer_max_tokens_per_micro_batch": tokens} if dynamic else {"infer_batch_size": count}


def _reference(in_loss: Any, in_reward: Any, **sizes: Any) -> Flags:
    """Return the sizes of the reference that differ from the policy's."""
    own = {name: sizes[name] for name in _REFERENCE_SIZES if name in sizes and (in_loss or in_reward)}
    return {f"ref_{name}": size for name, size in own.items() if size != sizes.get(f"policy_{name}", 1)}


def _trackers(value: Any) -> Flags:
    names = value if isinstance(value, list) else [value]
    return {"report_to": [name for name in names if name != "console"] or None}


def _batches_of_verl(rollout: Any, step: Any, group: Any) -> Flags:
    """Count completions: verl counts prompts."""
    size = whole(group)
    return batch_sizes(size, whole(step) * size, whole(rollout) * size)


VERL = Table(
    "verl",
    ("actor_rollout_ref.",),
    {
        # data
        **flags("data.", """
            train_files:dataset val_files:val_dataset max_prompt_length:max_length
            max_response_length:max_completion_length seed:data_seed"""),
        "data.shuffle": "dataset_shuffle train_dataloader_shuffle",
        "data.reward_fn_key": ByHand("reward functions get every column of the dataset"),
        "data.custom_cls.*": ByHand("register the dataset with --external_plugins"),
        **each("data.", "return_* *workers", OWN),
        "custom_reward_function.*": REWARD_CLASS,
        "reward_model.reward_manager": ByHand("choose --reward_funcs"),
        "reward_model.enable": choice({"false": {}}, REWARD_MODEL),
        "reward_model.model.*": ByHand(REWARD_MODEL),
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
            grad_clip:clip_grad entropy_coeff:entropy_coef ppo_epochs:num_iterations
            freeze_vision_tower:freeze_vit checkpoint.async_save:async_save"""),
        **flags(f"{_ACTOR}.megatron.", """
            tensor_model_parallel_size expert_model_parallel_size expert_tensor_parallel_size
            pipeline_model_parallel_size virtual_pipeline_model_parallel_size context_parallel_size
            use_distributed_optimizer seed dtype:torch_dtype param_dtype:torch_dtype param_offload:offload_model
            grad_offload:offload_grad optimizer_offload:offload_optimizer"""),
        **flags(f"{_ACTOR}.megatron.override_transformer_config.", """
            recompute_granularity recompute_modules recompute_method recompute_num_layers attention_backend
            moe_grouped_gemm moe_permute_fusion moe_router_dtype moe_token_dispatcher_type
            moe_shared_expert_overlap moe_aux_loss_coeff moe_z_loss_coeff"""),
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
        f"{_ACTOR}.fsdp_config.*":
            Needless("Megatron's distributed optimizer shards the states; set the layout by hand"),
        f"{_ACTOR}.ulysses_sequence_parallel_size": ByHand("use --context_parallel_size"),
        **each(f"{_ACTOR}.", "use_torch_compile load_weight checkpoint.*", OWN),
        # rollout
        f"{_ROLLOUT}.name": choice({"vllm": {}, "sglang": {}, "hf": {}}),
        f"{_ROLLOUT}.mode": choice({"sync": {}, "async": {}}),
        **flags(f"{_ROLLOUT}.", """
            temperature top_p top_k gpu_memory_utilization:vllm_gpu_memory_utilization
            tensor_model_parallel_size:vllm_tensor_parallel_size enforce_eager:vllm_enforce_eager
            max_model_len:vllm_max_model_len max_num_seqs:vllm_max_num_seqs
            enable_prefix_caching:vllm_enable_prefix_caching val_kwargs.n:num_generations_eval
            val_kwargs.temperature:eval_temperature val_kwargs.top_p:eval_top_p"""),
        **each(f"{_ROLLOUT}.", "enable_chunked_prefill max_num_batched_tokens load_format dtype layered_summon "
               "calculate_log_probs", OWN),
        **each(f"{_ROLLOUT}.", "multi_turn.* agent.*", TURNS),
        # reference
        f"{_REF}.log_prob_*": Needless("the reference takes --infer_max_tokens_per_micro_batch or --infer_batch_size"),
        f"{_REF}.megatron.*": Needless("the reference has the layout of the policy, but for --ref_* sizes"),
        f"{_REF}.fsdp_config.*": Needless("the reference is offloaded with --offload_model true"),
        f"{_REF}.*": OWN,
        # algorithm
        "algorithm.kl_ctrl.type": choice({"fixed": {}}, "use --kl_target and --kl_horizon"),
        "algorithm.filter_groups.enable": "dynamic_sample",
        # verl counts the first batch; 0: as many as it takes
        "algorithm.filter_groups.max_num_gen_batches": Computed(
            ["max_resample_times"], lambda value: {"max_resample_times": value - 1} if value > 1 else {}
        ),
        "algorithm.filter_groups.metric": Needless("groups of equal rewards are replaced"),
        "algorithm.gamma": choice({"1": {}, "1.0": {}}, "advantages are not discounted here"),
        **each("", "algorithm.lam critic.* trainer.critic_warmup", CRITIC),
        # trainer
        **flags("trainer.", """
            total_epochs:num_train_epochs max_actor_ckpt_to_keep:save_total_limit default_local_dir:output_dir
            n_gpus_per_node:NPROC_PER_NODE nnodes:NNODES project_name:wandb_project experiment_name:wandb_exp_name
            rollout_data_dir:rollout_dump val_before_train:eval_before_train"""),
        "trainer.total_training_steps": when_positive("train_iters"),
        "trainer.save_freq": when_positive("save_steps"),
        "trainer.test_freq": when_positive("eval_steps"),
        "trainer.logger": Computed(["report_to"], _trackers),
        "trainer.resume_mode": RESUME,
        "trainer.balance_batch": BALANCED,
        **each("", "trainer.ray_* ray_kwargs.* ray_init.*", Needless("torchrun starts the ranks, without Ray")),
        **each("", f"trainer.device {_MODEL}.trust_remote_code {_MODEL}.use_shm *._target_ *.profiler.* "
               "global_profiler.* hydra.*", OWN),
    },
    defaults={
        "algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": True, _KL_IN_REWARD: False,
        _KL_IN_LOSS: False, f"{_ACTOR}.loss_agg_mode": "token-mean", f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
        f"{_ACTOR}.clip_ratio": 0.2, "algorithm.kl_penalty": "kl",
        f"{_ACTOR}.clip_ratio_c": 3.0, f"{_ACTOR}.megatron.sequence_parallel": True,
        f"{_ACTOR}.use_dynamic_bsz": False, f"{_ACTOR}.ppo_max_token_len_per_gpu": 16384,
        f"{_ACTOR}.ppo_mini_batch_size": 256, f"{_ACTOR}.optim.lr": 1e-6, f"{_ACTOR}.optim.lr_decay_style": "constant",
        f"{_ACTOR}.optim.weight_decay": 0.01, f"{_ACTOR}.optim.betas": [0.9, 0.999],
        "data.prompt_key": "prompt", "data.truncation": "error",
        "data.train_batch_size": 1024, "data.max_prompt_length": 512, "data.max_response_length": 512,
        f"{_ROLLOUT}.n": 1, f"{_ROLLOUT}.temperature": 1.0, f"{_ROLLOUT}.gpu_memory_utilization": 0.5,
        f"{_ROLLOUT}.tensor_model_parallel_size": 2, f"{_ROLLOUT}.free_cache_engine": True,
    },
    together=(
        Together(_columns, "columns", prompt="data.prompt_key", images="data.image_key"),
        Together(_long_prompts, "truncation_strategy", filtered="data.filter_overlong_prompts",
                 truncation="data.truncation"),
        Together(_batches_of_verl, "num_generations global_batch_size generation_batch_size",
                 rollout="data.train_batch_size", step=f"{_ACTOR}.ppo_mini_batch_size", group=f"{_ROLLOUT}.n"),
        Together(micro_batches, "max_tokens_per_micro_batch micro_batch_size", dynamic=f"{_ACTOR}.use_dynamic_bsz",
                 tokens=f"{_ACTOR}.ppo_max_token_len_per_gpu", count=f"{_ACTOR}.ppo_micro_batch_size_per_gpu"),
        Together(_inference, "infer_max_tokens_per_micro_batch infer_batch_size",
                 dynamic=f"{_ROLLOUT}.log_prob_use_dynamic_bsz", tokens=f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
                 count=f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
        Together(_loss, "loss_type importance_sampling_level dual_clip", aggregation=f"{_ACTOR}.loss_agg_mode",
                 mode=f"{_ACTOR}.policy_loss.loss_mode", bound=f"{_ACTOR}.clip_ratio_c"),
        Together(_clip_of_verl, "epsilon epsilon_high", both=f"{_ACTOR}.clip_ratio", low=f"{_ACTOR}.clip_ratio_low",
                 high=f"{_ACTOR}.clip_ratio_high", reads={"mode": f"{_ACTOR}.policy_loss.loss_mode"}),
        Together(_advantages, "advantage_estimator scale_rewards", estimator="algorithm.adv_estimator",
                 by_std="algorithm.norm_adv_by_std_in_grpo"),
        Together(_kl_estimator, "kl_estimator", of_loss=f"{_ACTOR}.kl_loss_type", of_reward="algorithm.kl_penalty",
                 reads={"in_reward": _KL_IN_REWARD}),
        Together(partial(kl, of_loss=0.001, of_reward=0.001), "beta kl_in_reward", in_loss=_KL_IN_LOSS,
                 of_loss=f"{_ACTOR}.kl_loss_coef", in_reward=_KL_IN_REWARD, of_reward="algorithm.kl_ctrl.kl_coef"),
        Together(adapter, "tuner_type lora_rank lora_alpha target_modules", rank=f"{_MODEL}.lora_rank",
                 alpha=f"{_MODEL}.lora_alpha", nested_rank=f"{_MODEL}.lora.rank", nested_alpha=f"{_MODEL}.lora.alpha"),
        # verl frees vLLM's cache and offloads its weights between rollouts.
        Together(lambda on: {"sleep_level": 1 if on else 0}, "sleep_level", on=f"{_ROLLOUT}.free_cache_engine"),
        Together(lambda on, size=1: {"sequence_parallel": True} if on and size != 1 else {}, "sequence_parallel",
                 on=f"{_ACTOR}.megatron.sequence_parallel",
                 reads={"size": f"{_ACTOR}.megatron.tensor_model_parallel_size"}),
        Together(_reference, " ".join(f"ref_{name}" for name in _REFERENCE_SIZES),
                 **{name: f"{_REF}.megatron.{name}" for name in _REFERENCE_SIZES},
                 reads={"in_loss": _KL_IN_LOSS, "in_reward": _KL_IN_REWARD,
                        **{f"policy_{name}": f"{_ACTOR}.megatron.{name}" for name in _REFERENCE_SIZES}}),
    ),
)  # fmt: skip
