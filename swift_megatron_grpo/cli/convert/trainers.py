"""Tables of slime and of ROLL.

slime has flags after `python3 train.py` or `train_async.py`, of which many are Megatron's and have the same name here.
ROLL has YAML.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from swift_megatron_grpo.cli.convert.rules import (
    BALANCED,
    CRITIC,
    OWN,
    RESUME,
    REWARD_CLASS,
    REWARD_MODEL,
    TARGETS,
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
    Undecided,
    choice,
    each,
    flags,
    values_of,
    when_positive,
    whole,
)

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
    return {**batch_sizes(group, size, rollout), "train_iters": steps}


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
        "--load": RESUME,
        "--*-key": ByHand("rename the column to `messages`, `solution` and so on, or use --columns"),
        "--apply-chat-template": Needless("the template of the model is always applied"),
        "--rollout-shuffle": "dataset_shuffle train_dataloader_shuffle",
        "--rm-type": ByHand("choose --reward_funcs; accuracy compares the answer with the column `solution`"),
        "--custom-rm-path": REWARD_CLASS,
        "--custom-generate-function-path": TURNS,
        "--dynamic-sampling-filter-path": ByHand("--dynamic_sample true replaces groups of equal rewards"),
        "--over-sampling-batch-size": ByHand("--spare_groups auto generates more groups with each rollout"),
        "--balance-data": BALANCED,
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
        Together(partial(micro_batches, count=1), "max_tokens_per_micro_batch micro_batch_size",
                 dynamic="--use-dynamic-batch-size", tokens="--max-tokens-per-gpu", count="--micro-batch-size"),
        Together(partial(kl, in_reward=True), "beta kl_in_reward", in_loss="--use-kl-loss", of_loss="--kl-loss-coef",
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
    sizes = batch_sizes(size, whole(micro) * whole(accumulated) * replicas, whole(rollout) * size)
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
            num_gpus_per_node exp_name logging_dir rpc_timeout actor_train.device_mapping hydra.* defaults""", OWN),
        **each(f"{_SAMPLING}.", "max_new_tokens num_return_sequences num_beams", OWN),
        **each(f"{_ENGINE}.", "load_format block_size max_num_batched_tokens", OWN),
        **each("", f"{_ROLL_MODEL}.model_type {_LAYOUT}.bf16", OWN),
        "reward_pretrain": ByHand(REWARD_MODEL),
        "max_steps": when_positive("train_iters"),
        "eval_steps": when_positive("eval_steps"),
        "track_with": values_of("report_to", "tensorboard wandb swanlab stdout:"),
        "checkpoint_config.*": ByHand("checkpoints are written to --output_dir"),
        "resume_from_checkpoint": RESUME,
        "adv_estimator": values_of("advantage_estimator", "grpo reinforce:reinforce_plus_plus_plain",
                                   "it needs a critic, or is not known here"),
        "dual_clip_loss": choice({"true": {"dual_clip": 3.0}, "false": {}}),
        "importance_sampling": values_of("importance_sampling_level", "token seq:sequence"),
        "value_clip": CRITIC,
        "async_generation_ratio": Computed(["async_generate", "max_staleness"], _ahead),
        "rewards.*": REWARD_CLASS,
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
        "critic.*": CRITIC,
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
        Together(kl, "beta kl_in_reward", in_loss="use_kl_loss", of_loss="kl_loss_coef", of_reward="init_kl_coef",
                 in_reward="add_token_level_kl"),
        Together(clip, "epsilon epsilon_high", both="pg_clip", low="pg_clip_low", high="pg_clip_high"),
        Together(adapter, "tuner_type lora_rank lora_alpha lora_dropout target_modules",
                 rank=f"{_ROLL_MODEL}.lora_rank", alpha=f"{_ROLL_MODEL}.lora_alpha",
                 dropout=f"{_ROLL_MODEL}.lora_dropout"),
    ),
)  # fmt: skip
