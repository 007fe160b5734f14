#!/usr/bin/env bash
# Full-parameter GRPO of a dense model on one machine, with vLLM in the training processes.
#   MODEL=Qwen/Qwen3-8B DATASET=data.jsonl OUTPUT=output templates/dense_colocate_full.sh [flags that override these]
# DATASET: one JSON object per line, with `messages` and the columns that the reward functions read (`solution` for
# accuracy).
set -euo pipefail

# Number of ranks on this machine. On several machines also set NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT.
export NPROC_PER_NODE=${NPROC_PER_NODE:-8}
# Avoid memory fragmentation when vLLM and the trainer use the GPU alternately.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

args=(
    --rlhf_type grpo                         # the algorithm
    --model "${MODEL:-Qwen/Qwen3-8B}"        # hub name or folder
    --torch_dtype bfloat16                   # precision of weights and activations
    --tuner_type full                        # train all weights

    # Parallel layout: ranks = TP * PP * CP * DP. Check another one: swift-megatron-grpo check-layouts
    --tensor_model_parallel_size 2           # TP: ranks that share each layer
    --sequence_parallel true                 # divide activations between TP ranks as well
    --attention_backend flash                # without flash-attn: torch's kernel, or fused (cuDNN)
    --recompute_granularity none             # to save memory: full, which takes a third more FLOPs

    # Data and rewards.
    --dataset "${DATASET:?set a file or hub name}" # one JSON object per line, with `messages`
    --load_from_cache_file true              # reuse the preprocessed dataset of an earlier run
    --reward_funcs accuracy                  # needs pip install ".[math]" and a column `solution`

    # Batch sizes count completions. A rollout has 256 = 32 prompts * 8 and is trained in two optimizer steps of 128.
    --num_generations 8                      # completions per prompt
    --global_batch_size 128                  # completions per optimizer step
    --steps_per_generation 2                 # optimizer steps per rollout
    --max_tokens_per_micro_batch 8192        # tokens of one pass: 8B fits into 80 GB; an H200 has room for 16384
    --max_length 2048                        # tokens of a prompt, at most
    --max_completion_length 4096             # tokens of a completion, at most
    --temperature 1.0                        # of sampling

    # Generation with vLLM in the training processes.
    --use_vllm true                          # generate with vLLM
    --vllm_mode colocate                     # vLLM runs in the training processes
    --vllm_tensor_parallel_size 2            # ranks that share one vLLM engine
    --vllm_gpu_memory_utilization 0.6        # share of the GPU memory for vLLM
    --vllm_max_model_len 6144                # max_length + max_completion_length
    --sleep_level 2                          # vLLM frees all memory while training; each sync resends the weights
    # What may be offloaded while vLLM generates. Nothing is offloaded if everything fits.
    --offload_model true                     # weights
    --offload_optimizer true                 # optimizer states
    --offload_grad true                      # gradient buffers

    # Optimization.
    --train_iters 500                        # optimizer steps
    --lr 1e-6                                # learning rate
    --lr_warmup_fraction 0.05                # share of the steps in which the learning rate rises
    --beta 0                                 # weight of the KL term; with 0 there is no reference model
    --epsilon 0.2                            # lower clipping bound of the ratio: 1 - 0.2
    --epsilon_high 0.28                      # upper clipping bound of the ratio: 1 + 0.28

    # Output.
    --output_dir "${OUTPUT:-output}"         # logs and checkpoints
    --save_steps 50                          # steps between checkpoints
    --save_total_limit 3                     # checkpoints to keep
    --logging_steps 1                        # log every step
    --log_completions true                   # write completions and rewards to a file
    --report_to tensorboard                  # or wandb, swanlab, none
)
exec megatron rlhf "${args[@]}" "$@"
