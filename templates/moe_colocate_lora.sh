#!/usr/bin/env bash
# GRPO of a LoRA adapter on a mixture of experts, vLLM in the training processes.
#   MODEL=Qwen/Qwen3-30B-A3B-Instruct-2507 DATASET=data.jsonl OUTPUT=output templates/moe_colocate_lora.sh [more flags]
# DATASET: one json object a line with `messages`, and the columns that the reward functions read (`solution` for accuracy).
set -euo pipefail

export NPROC_PER_NODE=${NPROC_PER_NODE:-8}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

args=(
    --rlhf_type grpo
    --model "${MODEL:-Qwen/Qwen3-30B-A3B-Instruct-2507}"
    --torch_dtype bfloat16
    --tuner_type lora
    --lora_rank 16
    --lora_alpha 32
    --lora_dropout 0
    --target_modules all-linear     # experts as well; the router is left alone

    # The layout: EP divides the experts over ranks of DP * TP. LoRA needs expert_tensor_parallel_size 1.
    --tensor_model_parallel_size 2
    --sequence_parallel true
    --expert_model_parallel_size 8
    --moe_grouped_gemm true
    --moe_permute_fusion true
    --moe_aux_loss_coeff 1e-3
    --attention_backend flash       # fused (cuDNN) where flash-attn is not installed
    --recompute_granularity selective

    --dataset "$DATASET"
    --reward_funcs accuracy format

    --num_generations 8
    --global_batch_size 128
    --micro_batch_size 2
    --max_length 2048
    --max_completion_length 4096
    --temperature 1.0

    # vLLM spreads the experts over its tensor-parallel ranks.
    --use_vllm true
    --vllm_mode colocate
    --vllm_tensor_parallel_size 4
    --vllm_gpu_memory_utilization 0.4
    --vllm_max_model_len 6144
    --sleep_level 1
    --offload_model true            # may leave the GPU while vLLM generates; nothing does while everything fits

    --num_train_epochs 1
    --lr 1e-5
    --beta 0.001

    --output_dir "${OUTPUT:-output}"
    --save_steps 50
    --logging_steps 1
    --log_completions true
)
exec megatron rlhf "${args[@]}" "$@"
