"""Flags of slime, after `python3 train.py` or `train_async.py`. Many are Megatron's and have the same name here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift_megatron_grpo.cli.convert.tables import (
    ByHand,
    Computed,
    Flags,
    Needless,
    Rule,
    Table,
    Together,
    choice,
    each,
    flags,
    values_of,
    whole,
)

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


def _batches(settings: Mapping[str, Any]) -> Flags:
    """Return sizes in completions. slime counts prompts of a rollout, and completions of a step."""
    size = whole(settings["--n-samples-per-prompt"])
    rollout = size * whole(settings["--rollout-batch-size"])
    step = whole(settings.get("--global-batch-size", rollout // whole(settings.get("--num-steps-per-rollout", 1))))
    steps = whole(settings["--num-rollout"]) * (rollout // step) if "--num-rollout" in settings else None
    differ = {"generation_batch_size": rollout} if rollout != step else {}
    return {"num_generations": size, "global_batch_size": step, **differ, "train_iters": steps}


def _micro_batches(settings: Mapping[str, Any]) -> Flags:
    if settings.get("--use-dynamic-batch-size"):
        return {"max_tokens_per_micro_batch": settings.get("--max-tokens-per-gpu")}
    return {"micro_batch_size": settings.get("--micro-batch-size", 1)}


def _kl(settings: Mapping[str, Any]) -> Flags:
    in_reward = settings.get("--kl-coef", 0)
    if in_reward:
        return {"beta": in_reward, "kl_in_reward": True}
    return {"beta": settings.get("--kl-loss-coef", 0) if settings.get("--use-kl-loss") else 0, "kl_in_reward": False}


def _correction(settings: Mapping[str, Any]) -> Flags:
    if not settings.get("--use-tis"):
        return {}
    return {
        "rollout_importance_sampling_mode": "token_truncate",
        "rollout_importance_sampling_threshold": settings.get("--tis-clip", 2.0),
    }


def _names_and_paths(value: Any) -> Flags:
    """Return every second word: the value is NAME PATH NAME PATH ..."""
    return {"val_dataset": value[1::2] if isinstance(value, list) else value}


_RULES: dict[str, Rule] = {
    **{f"--{name.replace('_', '-')}": name for name in _SAME.split()},
    **flags("--", """
        hf-checkpoint:model save:output_dir save-interval:save_steps prompt-data:dataset
        rollout-max-prompt-len:max_length rollout-max-response-len:max_completion_length
        rollout-max-context-len:vllm_max_model_len rollout-temperature:temperature rollout-top-p:top_p
        rollout-top-k:top_k rollout-seed:data_seed eval-interval:eval_steps
        n-samples-per-eval-prompt:num_generations_eval eval-temperature:eval_temperature eval-top-p:eval_top_p
        eval-max-response-len:eval_max_completion_length
        log-probs-max-tokens-per-gpu:infer_max_tokens_per_micro_batch entropy-coef:entropy_coef eps-clip:epsilon
        eps-clip-high:epsilon_high eps-clip-c:dual_clip rollout-num-gpus-per-engine:vllm_tensor_parallel_size
        sglang-mem-fraction-static:vllm_gpu_memory_utilization actor-num-nodes:NNODES
        actor-num-gpus-per-node:NPROC_PER_NODE wandb-group:wandb_exp_name"""),
    **each("--", _SHAPE.replace("_", "-"), Needless("read from config.json of the model")),
    "--ref-load": Needless("the reference is the model at its start, loaded from its checkpoint of Hugging Face"),
    "--load": ByHand("to continue from a checkpoint: --resume auto, or --resume FOLDER"),
    "--*-key": ByHand("rename the column to `messages`, `solution` and so on, or use --columns"),
    "--apply-chat-template": Needless("the template of the model is always applied"),
    "--rollout-shuffle": choice({"true": {"dataset_shuffle": True, "train_dataloader_shuffle": True}}),
    "--rm-type": ByHand("choose --reward_funcs; accuracy compares the answer with the column `solution`"),
    "--custom-rm-path": ByHand("write a reward class (docs of ms-swift: ORM), --external_plugins and --reward_funcs"),
    "--custom-generate-function-path": ByHand("see docs/multi_turn.md: --multi_turn_scheduler and --max_turns"),
    "--dynamic-sampling-filter-path": ByHand("--dynamic_sample true replaces groups of equal rewards"),
    "--over-sampling-batch-size": ByHand("--max_resample_times bounds how often groups are replaced"),
    "--balance-data": Needless("every data-parallel rank gets the same work"),
    "--eval-prompt-data": Computed(["val_dataset"], _names_and_paths),
    "--eval-*": ByHand("see docs/evaluation.md"),
    "--advantage-estimator": choice(_ESTIMATORS, "it needs a critic, or is not known here"),
    "--kl-loss-type": values_of("kl_estimator", "k1 k2 k3 low_var_kl:k3"),
    "--use-routing-replay": choice({"true": {"router_replay_mode": "R2"}}),
    "--use-rollout-routing-replay": choice({"true": {"router_replay_mode": "R3"}}),
    "--attention-dropout": Needless("0, as in config.json"),
    "--hidden-dropout": Needless("0"),
    "--colocate": choice({"true": {"vllm_mode": "colocate"}}),
    "--rollout-num-gpus": ByHand(
        "start `swift rollout` on these GPUs: --vllm_mode server; see templates/dense_server.sh"
    ),
    "--sglang-*": ByHand("vLLM generates here: --vllm_engine_kwargs has its settings"),
    "--use-wandb": choice({"true": {"report_to": "wandb"}}),
    "--wandb-key": ByHand("export WANDB_API_KEY"),
    "--offload*": Needless("weights and states are offloaded only if vLLM would not fit otherwise"),
    "--train-backend": choice({"megatron": {}, "fsdp": {}}),
}  # fmt: skip

SLIME = Table(
    "slime",
    ("--hf-checkpoint",),
    _RULES,
    defaults={
        "--n-samples-per-prompt": 1,
        "--rollout-temperature": 1.0,
        "--eps-clip": 0.2,
        "--advantage-estimator": "grpo",
        "--weight-decay": 0.01,
        "--adam-beta2": 0.999,
    },
    together=(
        Together(("--n-samples-per-prompt", "--rollout-batch-size", "--global-batch-size", "--num-steps-per-rollout",
                  "--num-rollout"),
                 ("num_generations", "global_batch_size", "generation_batch_size", "train_iters"), _batches),
        Together(("--use-dynamic-batch-size", "--max-tokens-per-gpu", "--micro-batch-size"),
                 ("max_tokens_per_micro_batch", "micro_batch_size"), _micro_batches),
        Together(("--use-kl-loss", "--kl-loss-coef", "--kl-coef"), ("beta", "kl_in_reward"), _kl),
        Together(("--use-tis", "--tis-clip"),
                 ("rollout_importance_sampling_mode", "rollout_importance_sampling_threshold"), _correction),
    ),
)  # fmt: skip
