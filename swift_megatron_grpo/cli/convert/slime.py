"""Flags of slime, after `python3 train.py` or `train_async.py`. Many are Megatron's and have the same name here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from swift_megatron_grpo.cli.convert.tables import (
    ByHand,
    Computed,
    Flags,
    Needless,
    Rule,
    Table,
    batch_sizes,
    choice,
    each,
    flags,
    micro_batches,
    together,
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


def _batches(group: Any, prompts: Any, step: Any = None, per_rollout: Any = 1, number: Any = None) -> Flags:
    """Return sizes in completions. slime counts prompts of a rollout, and completions of a step."""
    rollout = whole(group) * whole(prompts)
    size = rollout // whole(per_rollout) if step is None else whole(step)
    steps = None if number is None else whole(number) * (rollout // size)
    return {**batch_sizes(group, size, rollout), "train_iters": steps}


def _kl(in_loss: Any = False, of_loss: Any = 0, of_reward: Any = 0) -> Flags:
    return {"beta": of_reward or (of_loss if in_loss else 0), "kl_in_reward": bool(of_reward)}


def _correction(on: Any = False, bound: Any = 2.0) -> Flags:
    of_tokens = {"rollout_importance_sampling_mode": "token_truncate", "rollout_importance_sampling_threshold": bound}
    return of_tokens if on else {}


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
    "--rollout-shuffle": "dataset_shuffle train_dataloader_shuffle",
    "--rm-type": ByHand("choose --reward_funcs; accuracy compares the answer with the column `solution`"),
    "--custom-rm-path": ByHand("write a reward class (docs of ms-swift: ORM), --external_plugins and --reward_funcs"),
    "--custom-generate-function-path": ByHand("see docs/multi_turn.md: --multi_turn_scheduler and --max_turns"),
    "--dynamic-sampling-filter-path": ByHand("--dynamic_sample true replaces groups of equal rewards"),
    "--over-sampling-batch-size": ByHand("--max_resample_times bounds how often groups are replaced"),
    "--balance-data": Needless("every data-parallel rank gets the same work"),
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
}  # fmt: skip

SLIME = Table(
    "slime",
    ("--hf-checkpoint",),
    _RULES,
    defaults={
        "--n-samples-per-prompt": 1, "--rollout-temperature": 1.0, "--eps-clip": 0.2, "--advantage-estimator": "grpo",
        "--weight-decay": 0.01, "--adam-beta2": 0.999,
    },
    together=(
        together(_batches, "num_generations global_batch_size generation_batch_size train_iters",
                 group="--n-samples-per-prompt", prompts="--rollout-batch-size", step="--global-batch-size",
                 per_rollout="--num-steps-per-rollout", number="--num-rollout"),
        together(partial(micro_batches, count=1), "max_tokens_per_micro_batch micro_batch_size",
                 dynamic="--use-dynamic-batch-size", tokens="--max-tokens-per-gpu", count="--micro-batch-size"),
        together(_kl, "beta kl_in_reward", in_loss="--use-kl-loss", of_loss="--kl-loss-coef", of_reward="--kl-coef"),
        together(_correction, "rollout_importance_sampling_mode rollout_importance_sampling_threshold", on="--use-tis",
                 bound="--tis-clip"),
    ),
)  # fmt: skip
