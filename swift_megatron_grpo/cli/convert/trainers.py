"""Tables of verl and siiRL, of slime, and of ROLL.

verl and siiRL have key=value words after `python3 -m verl.trainer.main_ppo`, or YAML. slime has flags after `python3
train.py` or `train_async.py`, of which many are Megatron's and have the same name here. ROLL has YAML.
"""

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from swift_megatron_grpo.cli.convert.tables import (
    ByHand,
    Computed,
    Flags,
    Needless,
    NoCounterpart,
    Table,
    Together,
    Undecided,
    choice,
    each,
    flags,
    text_of,
    values_of,
    when_positive,
    whole,
)

_OWN = Needless("chosen by this trainer")
_CRITIC = Needless("GRPO has no critic")
_BALANCED = Needless("every data-parallel rank gets the same work")
_REWARD_MODEL = "--reward_model with the model, or with the address of its server: docs/reward_models.md"
_REWARD_CLASS = ByHand("write a reward class (docs of ms-swift: ORM), --external_plugins and --reward_funcs")
_RESUME = ByHand("to continue from a checkpoint: --resume auto, or --resume FOLDER")
_TURNS = ByHand("see docs/multi_turn.md: --multi_turn_scheduler and --max_turns")


def _clip(both: Any = 0.2, low: Any = None, high: Any = None) -> Flags:
    """Return the bounds of the clip; `both` counts where one is not set. Without its flag the upper is the lower."""
    low, high = (both if bound is None else bound for bound in (low, high))
    return {"epsilon": low} | ({} if high == low else {"epsilon_high": high})


def _batch_sizes(group: int, step: int, rollout: int) -> Flags:
    sizes = {"num_generations": group, "global_batch_size": step}
    return sizes if rollout == step else sizes | {"generation_batch_size": rollout}


def _micro_batches(dynamic: Any = False, tokens: Any = None, count: Any = None) -> Flags:
    return {"max_tokens_per_micro_batch": tokens} if dynamic else {"micro_batch_size": count}


def _kl(in_loss: Any = False, in_reward: Any = False, of_loss: Any = 0, of_reward: Any = 0) -> Flags:
    loss, reward = in_loss and of_loss, in_reward and of_reward
    if loss and reward:
        raise NoCounterpart("the KL term is in the loss or in the reward here, not in both")
    return {"beta": loss or reward or 0, "kl_in_reward": bool(reward)}


def _targets(value: Any) -> Flags:
    names = value if isinstance(value, list) else str(value).split(",")
    if not {*names} <= {"all-linear", "all"}:
        raise NoCounterpart("all linear layers get adapters; --target_modules has the names of docs/lora.md")
    return {}


TARGETS = Computed(["target_modules"], _targets)


def adapter(rank: Any = None, alpha: Any = None, dropout: Any = None, nested_rank: Any = None,
            nested_alpha: Any = None, on: Any = True) -> Flags:  # fmt: skip
    if not (on and (rank or nested_rank)):
        return {"tuner_type": "full"}
    sizes = {"lora_rank": rank or nested_rank, "lora_alpha": alpha or nested_alpha, "lora_dropout": dropout}
    return {"tuner_type": "lora", **sizes, "target_modules": "all-linear"}


# ---- verl and siiRL

_MODEL, _ACTOR, _ROLLOUT, _REF = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout", "ref"))
_KL_IN_LOSS, _KL_IN_REWARD = f"{_ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
_REFERENCE_SIZES = [
    f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
]
_LOSSES = values_of(
    "loss_type", "token-mean:dapo seq-mean-token-mean:grpo seq-mean-token-sum:luspo seq-mean-token-sum-norm:dr_grpo"
)
_TRUNCATION = values_of(
    "truncation_strategy", "error:raise left", "prompts are cut at their beginning, left out or refused here"
)
_POLICY_LOSSES = choice({
    "vanilla": {}, "gspo": {"importance_sampling_level": "sequence"}, "cispo": {"loss_type": "cispo"},
    "dppo_tv": {"loss_type": "dppo_tv"}, "dppo_kl": {"loss_type": "dppo_kl"},
})  # fmt: skip


def _loss(aggregation: Any, mode: Any, bound: Any) -> Flags:
    dual_clip = {"dual_clip": bound} if mode == "vanilla" else {}
    return {**_LOSSES.rule(aggregation), **_POLICY_LOSSES.rule(mode), **dual_clip}


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
    return _batch_sizes(size, whole(step) * size, whole(rollout) * size)


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
        **each("data.", "return_* *workers", _OWN),
        "custom_reward_function.*": _REWARD_CLASS,
        "reward_model.reward_manager": ByHand("choose --reward_funcs"),
        "reward_model.enable": choice({"false": {}}, _REWARD_MODEL),
        "reward_model.model.*": ByHand(_REWARD_MODEL),
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
        f"{_ACTOR}.kl_loss_type": values_of("kl_estimator", "kl:k1 k1 abs mse:k2 k2 low_var_kl:k3 k3"),
        f"{_ACTOR}.fsdp_config.*":
            Needless("Megatron's distributed optimizer shards the states; set the layout by hand"),
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
        **each(f"{_ROLLOUT}.", "enable_chunked_prefill max_num_batched_tokens load_format dtype layered_summon "
               "calculate_log_probs", _OWN),
        **each(f"{_ROLLOUT}.", "multi_turn.* agent.*", _TURNS),
        # reference
        f"{_REF}.log_prob_*": Needless("the reference takes --infer_max_tokens_per_micro_batch or --infer_batch_size"),
        f"{_REF}.megatron.*": Needless("the reference has the layout of the policy, but for --ref_* sizes"),
        f"{_REF}.fsdp_config.*": Needless("the reference is offloaded with --offload_model true"),
        f"{_REF}.*": _OWN,
        # algorithm
        "algorithm.adv_estimator": values_of("advantage_estimator", """
            grpo rloo reinforce_plus_plus:reinforce_plus_plus_plain
            reinforce_plus_plus_baseline:reinforce_plus_plus""",
                                             "it needs a critic, or is not known here"),
        "algorithm.norm_adv_by_std_in_grpo": values_of("scale_rewards", "true:group false:none"),
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
        "trainer.resume_mode": _RESUME,
        "trainer.balance_batch": _BALANCED,
        **each("", "trainer.ray_* ray_kwargs.* ray_init.*", Needless("torchrun starts the ranks, without Ray")),
        **each("", f"trainer.device {_MODEL}.trust_remote_code {_MODEL}.use_shm *._target_ *.profiler.* "
               "global_profiler.* hydra.*", _OWN),
    },
    defaults={
        "algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": True, _KL_IN_REWARD: False,
        _KL_IN_LOSS: False, f"{_ACTOR}.loss_agg_mode": "token-mean", f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
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
        Together(_micro_batches, "max_tokens_per_micro_batch micro_batch_size", dynamic=f"{_ACTOR}.use_dynamic_bsz",
                 tokens=f"{_ACTOR}.ppo_max_token_len_per_gpu", count=f"{_ACTOR}.ppo_micro_batch_size_per_gpu"),
        Together(_inference, "infer_max_tokens_per_micro_batch infer_batch_size",
                 dynamic=f"{_ROLLOUT}.log_prob_use_dynamic_bsz", tokens=f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
                 count=f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
        Together(_loss, "loss_type importance_sampling_level dual_clip", aggregation=f"{_ACTOR}.loss_agg_mode",
                 mode=f"{_ACTOR}.policy_loss.loss_mode", bound=f"{_ACTOR}.clip_ratio_c"),
        Together(_clip, "epsilon epsilon_high", both=f"{_ACTOR}.clip_ratio", low=f"{_ACTOR}.clip_ratio_low",
                 high=f"{_ACTOR}.clip_ratio_high"),
        Together(partial(_kl, of_loss=0.001, of_reward=0.001), "beta kl_in_reward", in_loss=_KL_IN_LOSS,
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

# ---- slime

_ESTIMATORS: Mapping[str, Flags] = {
    "grpo": {"advantage_estimator": "grpo"},
    "gspo": {"advantage_estimator": "grpo", "importance_sampling_level": "sequence"},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus_plain"},
    "reinforce_plus_plus_baseline": {"advantage_estimator": "reinforce_plus_plus"},
}
# Flags of Megatron with the same name, value and meaning.
_SAME = """
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
    expert_tensor_parallel_size sequence_parallel recompute_granularity recompute_method recompute_num_layers
    recompute_modules optimizer lr min_lr lr_decay_style lr_warmup_iters lr_warmup_fraction weight_decay adam_beta1
    adam_beta2 clip_grad seed attention_backend attention_softmax_in_fp32 accumulate_allreduce_grads_in_fp32
    optimizer_cpu_offload use_precision_aware_optimizer moe_token_dispatcher_type moe_permute_fusion
    decoder_last_pipeline_num_layers wandb_project
"""
_SHAPE = """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups group_query_attention kv_channels
    qk_layernorm swiglu normalization norm_epsilon rotary_base rotary_percent use_rotary_position_embeddings
    vocab_size disable_bias_linear add_qkv_bias untie_embeddings_and_output_weights make_vocab_size_divisible_by
    num_experts moe_ffn_hidden_size moe_router_topk moe_layer_freq moe_router_score_function moe_grouped_gemm
    position_embedding_type max_position_embeddings
"""


def _batches_of_slime(group: Any, prompts: Any, step: Any = None, per_rollout: Any = 1, number: Any = None) -> Flags:
    """Return sizes in completions. slime counts prompts of a rollout, and completions of a step."""
    rollout = whole(group) * whole(prompts)
    size = rollout // whole(per_rollout) if step is None else whole(step)
    steps = None if number is None else whole(number) * (rollout // size)
    return {**_batch_sizes(group, size, rollout), "train_iters": steps}


def _correction(on: Any = False, bound: Any = 2.0) -> Flags:
    of_tokens = {"rollout_importance_sampling_mode": "token_truncate", "rollout_importance_sampling_threshold": bound}
    return of_tokens if on else {}


SLIME = Table(
    "slime",
    ("--hf-checkpoint",),
    {
        **{f"--{name.replace('_', '-')}": name for name in _SAME.split()},
        **flags("--", """
            hf-checkpoint:model save:output_dir save-interval:save_steps prompt-data:dataset
            rollout-max-prompt-len:max_length rollout-max-response-len:max_completion_length
            rollout-max-context-len:vllm_max_model_len rollout-temperature:temperature rollout-top-p:top_p
            rollout-top-k:top_k rollout-seed:data_seed eval-interval:eval_steps
            n-samples-per-eval-prompt:num_generations_eval eval-temperature:eval_temperature eval-top-p:eval_top_p
            eval-max-response-len:eval_max_completion_length
            log-probs-max-tokens-per-gpu:infer_max_tokens_per_micro_batch entropy-coef:entropy_coef
            eps-clip:epsilon eps-clip-high:epsilon_high eps-clip-c:dual_clip
            rollout-num-gpus-per-engine:vllm_tensor_parallel_size
            sglang-mem-fraction-static:vllm_gpu_memory_utilization actor-num-nodes:NNODES
            actor-num-gpus-per-node:NPROC_PER_NODE wandb-group:wandb_exp_name"""),
        **each("--", _SHAPE.replace("_", "-"), Needless("read from config.json of the model")),
        "--ref-load": Needless("the reference is the model at its start, loaded from its checkpoint of Hugging Face"),
        "--load": _RESUME,
        "--*-key": ByHand("rename the column to `messages`, `solution` and so on, or use --columns"),
        "--apply-chat-template": Needless("the template of the model is always applied"),
        "--rollout-shuffle": "dataset_shuffle train_dataloader_shuffle",
        "--rm-type": ByHand("choose --reward_funcs; accuracy compares the answer with the column `solution`"),
        "--custom-rm-path": _REWARD_CLASS,
        "--custom-generate-function-path": _TURNS,
        "--dynamic-sampling-filter-path": ByHand("--dynamic_sample true replaces groups of equal rewards"),
        "--over-sampling-batch-size": ByHand("--spare_groups auto generates more groups with each rollout"),
        "--balance-data": _BALANCED,
        "--eval-prompt-data": Computed(  # NAME PATH NAME PATH ...
            ["val_dataset"], lambda value: {"val_dataset": value[1::2] if isinstance(value, list) else value}
        ),
        "--eval-*": ByHand("see docs/evaluation.md"),
        "--advantage-estimator": choice(_ESTIMATORS, "it needs a critic, or is not known here"),
        "--kl-loss-type": values_of("kl_estimator", "k1 k2 k3 low_var_kl:k3"),
        "--use-routing-replay": choice({"true": {"router_replay_mode": "R2"}}),
        "--use-rollout-routing-replay": choice({"true": {"router_replay_mode": "R3"}}),
        "--attention-dropout": Needless("0, as in config.json"),
        "--hidden-dropout": Needless("0"),
        "--colocate": choice({"true": {"vllm_mode": "colocate"}}),
        "--rollout-num-gpus":
            ByHand("start `swift rollout` on these GPUs: --vllm_mode server; see templates/dense_server.sh"),
        "--sglang-*": ByHand("vLLM generates here: --vllm_engine_kwargs has its settings"),
        "--use-wandb": choice({"true": {"report_to": "wandb"}}),
        "--wandb-key": ByHand("export WANDB_API_KEY"),
        "--offload*": Needless("weights and states are offloaded only if vLLM would not fit otherwise"),
        "--train-backend": choice({"megatron": {}, "fsdp": {}}),
    },
    defaults={
        "--n-samples-per-prompt": 1, "--rollout-temperature": 1.0, "--eps-clip": 0.2, "--advantage-estimator": "grpo",
        "--weight-decay": 0.01, "--adam-beta2": 0.999,
    },
    together=(
        Together(_batches_of_slime, "num_generations global_batch_size generation_batch_size train_iters",
                 group="--n-samples-per-prompt", prompts="--rollout-batch-size", step="--global-batch-size",
                 per_rollout="--num-steps-per-rollout", number="--num-rollout"),
        Together(partial(_micro_batches, count=1), "max_tokens_per_micro_batch micro_batch_size",
                 dynamic="--use-dynamic-batch-size", tokens="--max-tokens-per-gpu", count="--micro-batch-size"),
        Together(partial(_kl, in_reward=True), "beta kl_in_reward", in_loss="--use-kl-loss", of_loss="--kl-loss-coef",
                 of_reward="--kl-coef"),
        Together(_correction, "rollout_importance_sampling_mode rollout_importance_sampling_threshold", on="--use-tis",
                 bound="--tis-clip"),
    ),
)  # fmt: skip

# ---- ROLL

_ARGUMENTS, _LAYOUT = "actor_train.training_args", "actor_train.strategy_args.strategy_config"
_ROLL_MODEL, _SAMPLING = "actor_train.model_args", "actor_infer.generating_args"
_ENGINE = "actor_infer.strategy_args.strategy_config"
_SAME_AS_POLICY = Needless("the engine and the reference load the model of the policy")
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def _gpus(mapping: Any) -> int:
    """Return how many GPUs train: the length of `list(range(0,8))` or of a list."""
    if isinstance(mapping, list):
        return len(mapping)
    match = re.fullmatch(r"\s*list\(range\((\d+),\s*(\d+)\)\)\s*", str(mapping))
    if match is None:
        raise Undecided("actor_train.device_mapping is not list(range(A,B)): set --global_batch_size, in completions")
    return int(match[2]) - int(match[1])


def _batches_of_roll(
    group: Any, rollout: Any, micro: Any = 1, accumulated: Any = 1, devices: Any = "", **layout: Any
) -> Flags:
    """Return sizes in completions. ROLL counts prompts of a rollout, and completions of each data-parallel rank."""
    size, gpus = whole(group), _gpus(devices)
    replicas = gpus
    for ranks in layout.values():
        replicas //= whole(ranks)
    sizes = _batch_sizes(size, whole(micro) * whole(accumulated) * replicas, whole(rollout) * size)
    return {**sizes, "micro_batch_size": micro, "NPROC_PER_NODE": gpus}


def _ahead(ratio: float) -> Flags:
    return {"async_generate": True, "max_staleness": max(1, round(ratio))} if ratio else {}


ROLL = Table(
    "ROLL",
    ("actor_train.", "actor_infer."),
    {
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
            tracker_kwargs.* is_num_return_sequences_expand enable_old_logprobs_recompute enable_reference
            num_gpus_per_node exp_name logging_dir rpc_timeout actor_train.device_mapping hydra.* defaults""", _OWN),
        **each(f"{_SAMPLING}.", "max_new_tokens num_return_sequences num_beams", _OWN),
        **each(f"{_ENGINE}.", "load_format block_size max_num_batched_tokens", _OWN),
        **each("", f"{_ROLL_MODEL}.model_type {_LAYOUT}.bf16", _OWN),
        "reward_pretrain": ByHand(_REWARD_MODEL),
        "max_steps": when_positive("train_iters"),
        "eval_steps": when_positive("eval_steps"),
        "track_with": values_of("report_to", "tensorboard wandb swanlab stdout:"),
        "checkpoint_config.*": ByHand("checkpoints are written to --output_dir"),
        "resume_from_checkpoint": _RESUME,
        "adv_estimator": values_of("advantage_estimator", "grpo reinforce:reinforce_plus_plus_plain",
                                   "it needs a critic, or is not known here"),
        "dual_clip_loss": choice({"true": {"dual_clip": 3.0}, "false": {}}),
        "importance_sampling": values_of("importance_sampling_level", "token seq:sequence"),
        "value_clip": _CRITIC,
        "async_generation_ratio": Computed(["async_generate", "max_staleness"], _ahead),
        "rewards.*": _REWARD_CLASS,
        f"{_ROLL_MODEL}.lora_target": TARGETS,
        f"{_ROLL_MODEL}.dtype": values_of("torch_dtype", "bf16:bfloat16 fp16:float16 fp32:float32"),
        f"{_ROLL_MODEL}.disable_gradient_checkpointing": Needless("--recompute_granularity decides"),
        f"{_ROLL_MODEL}.*attn*": ByHand("--attention_backend flash or fused"),
        f"{_ROLL_MODEL}.freeze_module_prefix": ByHand("--freeze_vit and --freeze_aligner are true by default"),
        "actor_train.data_args.file_name": "dataset",
        "actor_train.data_args.messages": ByHand("rename the column to `messages`, or use --columns"),
        "actor_train.data_args.*": ByHand("see the flags of ms-swift for datasets"),
        "actor_train.infer_batch_size": "infer_batch_size",
        "actor_train.use_sequence_packing": Needless("sequences are always packed"),
        "actor_train.strategy_args.strategy_name": choice({"megatron_train": {}, "deepspeed_train": {}}),
        **flags(f"{_LAYOUT}.", """
            tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
            expert_model_parallel_size expert_tensor_parallel_size virtual_pipeline_model_parallel_size
            sequence_parallel use_distributed_optimizer recompute_granularity recompute_method
            recompute_num_layers overlap_grad_reduce moe_grouped_gemm moe_token_dispatcher_type
            optimizer_cpu_offload optimizer_offload_fraction use_precision_aware_optimizer
            accumulate_allreduce_grads_in_fp32"""),
        **flags(f"{_LAYOUT}.additional_configs.", "recompute_granularity recompute_method recompute_num_layers"),
        "actor_infer.strategy_args.strategy_name": choice({"vllm": {}, "sglang": {}}),
        "actor_infer.device_mapping": ByHand("other GPUs than those that train: start `swift rollout` on them"),
        "actor_infer.*": _SAME_AS_POLICY,
        "reference.*": _SAME_AS_POLICY,
        "critic.*": _CRITIC,
        **flags("validation.", """
            data_args.file_name:val_dataset generating_args.num_return_sequences:num_generations_eval
            generating_args.temperature:eval_temperature generating_args.top_p:eval_top_p
            generating_args.max_new_tokens:eval_max_completion_length"""),
        "validation.*": ByHand("see docs/evaluation.md"),
        "system_envs.*": ByHand("export it"),
    },
    defaults={"num_return_sequences_in_group": 1, "rollout_batch_size": 128, f"{_SAMPLING}.temperature": 1.0},
    together=(
        Together(_batches_of_roll,
                 "num_generations global_batch_size micro_batch_size generation_batch_size NPROC_PER_NODE",
                 group="num_return_sequences_in_group", rollout="rollout_batch_size",
                 micro=f"{_ARGUMENTS}.per_device_train_batch_size",
                 accumulated=f"{_ARGUMENTS}.gradient_accumulation_steps",
                 reads={"devices": "actor_train.device_mapping", **{name: f"{_LAYOUT}.{name}" for name in _SIZES}}),
        Together(_kl, "beta kl_in_reward", in_loss="use_kl_loss", of_loss="kl_loss_coef", of_reward="init_kl_coef",
                 in_reward="add_token_level_kl"),
        Together(_clip, "epsilon epsilon_high", both="pg_clip", low="pg_clip_low", high="pg_clip_high"),
        Together(adapter, "tuner_type lora_rank lora_alpha lora_dropout target_modules",
                 rank=f"{_ROLL_MODEL}.lora_rank", alpha=f"{_ROLL_MODEL}.lora_alpha",
                 dropout=f"{_ROLL_MODEL}.lora_dropout"),
    ),
)  # fmt: skip
