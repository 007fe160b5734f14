#!/usr/bin/env bash
# GRPO on conversations of several turns with an environment, all weights, vLLM in the training processes.
#   MODEL=Qwen/Qwen3-1.7B DATASET=data.jsonl OUTPUT=output templates/multi_turn.sh [more flags, which win]
# DATASET: one json object a line with `messages`, and what the environment reads of the row.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export NPROC_PER_NODE=${NPROC_PER_NODE:-2}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

args=(
    --rlhf_type grpo
    --model "${MODEL:-Qwen/Qwen3-1.7B}"
    --torch_dtype bfloat16
    --tuner_type full
    --tensor_model_parallel_size 2
    --sequence_parallel true
    --attention_backend flash       # fused (cuDNN) where flash-attn is not installed
    --recompute_granularity selective

    --dataset "$DATASET"

    # The environment: a file of yours that registers it. ms-swift's gym_scheduler asks it for each next turn, and the sum of
    # its rewards is the completion's. --reward_funcs may add functions; they get `rollout_infos` and all `messages`.
    --external_plugins "$here/plugins/spelling.py"
    --multi_turn_scheduler gym_scheduler
    --gym_env spelling
    --max_turns 3

    # A turn may take max_completion_length tokens. The whole conversation ends where vllm_max_model_len does.
    --max_length 512
    --max_completion_length 256
    --vllm_max_model_len 2048

    # Conversations differ in length more than completions do.
    --max_tokens_per_micro_batch 8192

    --num_generations 8
    --global_batch_size 64
    --temperature 1.0

    --use_vllm true
    --vllm_mode colocate
    --vllm_tensor_parallel_size 1
    --vllm_gpu_memory_utilization 0.4
    --sleep_level 1
    --offload_model true
    --offload_optimizer true

    --num_train_epochs 1
    --lr 1e-6
    --beta 0

    --output_dir "${OUTPUT:-output}"
    --save_steps 50
    --logging_steps 1
    --log_completions true
)
exec megatron rlhf "${args[@]}" "$@"
