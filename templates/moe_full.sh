#!/usr/bin/env bash
# Full-parameter GRPO of a mixture-of-experts model, with vLLM in the training processes. Measured on four H200 with this
# layout and budget, and a smaller cache of vLLM: a step of 128 completions of 512 tokens takes 10 s.
#   MODEL=Qwen/Qwen3-30B-A3B-Instruct-2507 DATASET=data.jsonl OUTPUT=output templates/moe_full.sh [flags]
# Given flags override those below. DATASET: one JSON object per line, with `messages` and the columns that the reward
# functions read (`solution` for accuracy).
set -euo pipefail

# Number of ranks on this machine. On several machines also set NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT.
export NPROC_PER_NODE=${NPROC_PER_NODE:-4}
# Avoid memory fragmentation when vLLM and the trainer use the GPU alternately.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

args=(
    --rlhf_type grpo                         # the algorithm
    --model "${MODEL:-Qwen/Qwen3-30B-A3B-Instruct-2507}" # hub name or folder
    --torch_dtype bfloat16                   # precision of weights and activations
    --tuner_type full                        # train all weights

    # Parallel layout. EP divides the experts over ranks of DP * TP.
    --expert_model_parallel_size 4           # EP: ranks that share the experts of a layer
    --moe_grouped_gemm true                  # one matrix product for all experts of a rank
    --moe_permute_fusion true                # fused kernels that sort tokens by expert
    --attention_backend flash                # without flash-attn: torch's kernel, or fused (cuDNN)
    --recompute_granularity none             # to save memory: full, which takes a third more FLOPs

    # Data and rewards.
    --dataset "${DATASET:?set a file or hub name}" # one JSON object per line, with `messages`
    --reward_funcs accuracy                  # needs pip install ".[math]" and a column `solution`

    # Batch sizes count completions.
    --num_generations 8                      # completions per prompt
    --global_batch_size 128                  # completions per optimizer step
    --max_tokens_per_micro_batch 6144        # tokens of one forward and backward pass; less needs less memory
    --max_length 2048                        # tokens of a prompt, at most
    --max_completion_length 4096             # tokens of a completion, at most
    --temperature 1.0                        # of sampling

    # Generation with vLLM in the training processes.
    --use_vllm true                          # generate with vLLM
    --vllm_mode colocate                     # vLLM runs in the training processes
    --vllm_tensor_parallel_size 2            # ranks that share one vLLM engine and its experts
    --vllm_gpu_memory_utilization 0.4        # share of the GPU memory for vLLM
    --vllm_max_model_len 6144                # max_length + max_completion_length
    --sleep_level 2                          # while training, vLLM frees its weights and its cache
    --offload_model true                     # weights may be offloaded during generation, if not everything fits
    --offload_grad true                      # and gradients
    --offload_optimizer true                 # and states of the optimizer

    # Optimization.
    --train_iters 500                        # optimizer steps
    --lr 1e-6                                # learning rate
    --use_precision_aware_optimizer true     # states of the optimizer in the types below
    --exp_avg_dtype bf16                     # half of the bytes of fp32: on each of four GPUs 30 GB less
    --exp_avg_sq_dtype bf16
    --beta 0                                 # weight of the KL term; with 0 there is no reference model
    --router_agreement_samples 16            # log how often trainer and vLLM choose the same experts: docs/moe.md

    # Output.
    --output_dir "${OUTPUT:-output}"         # logs and checkpoints
    --save_steps 50                          # steps between checkpoints
    --logging_steps 1                        # log every step
    --log_completions true                   # write completions and rewards to a file
)
exec megatron rlhf "${args[@]}" "$@"
