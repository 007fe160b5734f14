#!/usr/bin/env bash
# GRPO of all weights of a dense model on one machine, vLLM in the training processes.
#   MODEL=Qwen/Qwen3-8B DATASET=data.jsonl OUTPUT=output templates/dense_colocate_full.sh [more flags, which win]
# DATASET: one json object a line with `messages`, and the columns that the reward functions read (`solution` for accuracy).
set -euo pipefail

# Ranks on this machine. On several machines also NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT.
export NPROC_PER_NODE=${NPROC_PER_NODE:-8}
# A memory allocator that does not fragment when vLLM and the trainer take turns.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

args=(
    --rlhf_type grpo
    --model "${MODEL:-Qwen/Qwen3-8B}"
    --torch_dtype bfloat16
    --tuner_type full

    # The layout: ranks = TP * PP * CP * DP. Prove another one first: python -m swift_megatron_grpo.tools.check_layouts.
    --tensor_model_parallel_size 2
    --sequence_parallel true
    --attention_backend flash       # fused (cuDNN) where flash-attn is not installed
    --recompute_granularity selective

    --dataset "$DATASET"
    --load_from_cache_file true
    --reward_funcs accuracy format

    # Batch sizes count completions. A rollout: 256 = 32 prompts * 8. An optimizer step: 128, so two steps a rollout.
    --num_generations 8
    --global_batch_size 128
    --steps_per_generation 2
    --micro_batch_size 4
    --max_length 2048               # of the prompt
    --max_completion_length 4096
    --temperature 1.0

    # Generation. Asleep at level 2 vLLM gives all its memory back; the next sync brings the weights anyway.
    --use_vllm true
    --vllm_mode colocate
    --vllm_tensor_parallel_size 2
    --vllm_gpu_memory_utilization 0.6
    --vllm_max_model_len 6144       # max_length + max_completion_length
    --sleep_level 2
    --offload_model true            # what may leave the GPU while vLLM generates; nothing does while everything fits
    --offload_optimizer true
    --offload_grad true

    --num_train_epochs 1
    --lr 1e-6
    --lr_warmup_fraction 0.05
    --beta 0                        # weight of the KL to the reference; 0: no reference model exists
    --epsilon 0.2
    --epsilon_high 0.28

    --output_dir "${OUTPUT:-output}"
    --save_steps 50
    --save_total_limit 3
    --logging_steps 1
    --log_completions true
    --report_to tensorboard         # or wandb, swanlab, none
)
exec megatron rlhf "${args[@]}" "$@"
