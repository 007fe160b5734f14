#!/usr/bin/env bash
# GRPO of a LoRA adapter on a dense model, vLLM in the training processes. Fits where all weights would not.
#   MODEL=Qwen/Qwen3-14B DATASET=data.jsonl OUTPUT=output templates/dense_colocate_lora.sh [more flags, which win]
# DATASET: one json object a line with `messages`, and the columns that the reward functions read (`solution` for accuracy).
set -euo pipefail

export NPROC_PER_NODE=${NPROC_PER_NODE:-4}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

args=(
    --rlhf_type grpo
    --model "${MODEL:-Qwen/Qwen3-14B}"
    --torch_dtype bfloat16

    # The adapter. vLLM gets base and adapter merged; the base itself is never written to.
    --tuner_type lora
    --lora_rank 32
    --lora_alpha 64
    --lora_dropout 0                # dropout in training would make the policy differ from the one that generated
    --target_modules all-linear
    --merge_lora true               # also save checkpoint-N-merged, which needs no peft to load

    --tensor_model_parallel_size 2
    --sequence_parallel true
    --attention_backend flash       # fused (cuDNN) where flash-attn is not installed
    --recompute_granularity selective

    --dataset "$DATASET"
    --reward_funcs accuracy format

    --num_generations 8
    --global_batch_size 64
    --micro_batch_size 4
    --max_length 2048
    --max_completion_length 2048
    --temperature 1.0

    --use_vllm true
    --vllm_mode colocate
    --vllm_tensor_parallel_size 2
    --vllm_gpu_memory_utilization 0.5
    --vllm_max_model_len 4096
    --sleep_level 2                 # every sync sends merged weights, so vLLM need not keep any
    --offload_model true            # may leave the GPU while vLLM generates; nothing does while everything fits

    --num_train_epochs 1
    --lr 1e-5                       # ten times that of full tuning
    --beta 0.001                    # the reference is the model without its adapter: no second copy

    --output_dir "${OUTPUT:-output}"
    --save_steps 50
    --logging_steps 1
    --log_completions true
)
exec megatron rlhf "${args[@]}" "$@"
