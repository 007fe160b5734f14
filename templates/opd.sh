#!/usr/bin/env bash
# On-policy distillation: a smaller model learns from a larger one on its own completions, without rewards.
#   MODEL=Qwen/Qwen3-1.7B TEACHER=Qwen/Qwen3-8B DATASET=data.jsonl OUTPUT=output templates/opd.sh [flags that override]
# DATASET: one JSON object per line, with `messages`. Both models need the same tokenizer. See docs/teachers.md.
set -euo pipefail

# Number of ranks on this machine. On several machines also set NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT.
export NPROC_PER_NODE=${NPROC_PER_NODE:-4}
# Avoid memory fragmentation when vLLM and the trainer use the GPU alternately.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

args=(
    --rlhf_type grpo                         # the algorithm: the teacher's log-ratio is an advantage
    --model "${MODEL:-Qwen/Qwen3-1.7B}"      # hub name or folder
    --torch_dtype bfloat16                   # precision of weights and activations

    # The teacher. With --reward_funcs as well, rewards and teacher add up.
    --teacher_model "${TEACHER:-Qwen/Qwen3-8B}" # hub name or folder, of the same tokenizer
    --teacher_kl_coef 1.0                    # weight of the teacher's log-ratio in the advantage of a token
    --offload_teacher_model true             # it may leave the GPU, if not everything fits

    # Parallel layout: ranks = TP * PP * CP * DP. The teacher's is the same, or that of --ref_..._parallel_size.
    --tensor_model_parallel_size 2           # TP: ranks that share each layer
    --sequence_parallel true                 # divide activations between TP ranks as well
    --attention_backend flash                # without flash-attn: torch's kernel, or fused (cuDNN)
    --recompute_granularity none             # to save memory: full, which takes a third more FLOPs

    # Data.
    --dataset "${DATASET:?set a file or hub name}" # one JSON object per line, with `messages`

    # Batch sizes count completions.
    --num_generations 1                      # completions per prompt: without rewards none are compared
    --global_batch_size 64                   # completions per optimizer step
    --max_tokens_per_micro_batch 16384       # tokens of one forward and backward pass; less needs less memory
    --max_length 2048                        # tokens of a prompt, at most
    --max_completion_length 2048             # tokens of a completion, at most
    --temperature 1.0                        # of sampling, and of both policies in the log-ratio

    # Generation with vLLM in the training processes.
    --use_vllm true                          # generate with vLLM
    --vllm_mode colocate                     # vLLM runs in the training processes
    --vllm_tensor_parallel_size 1            # ranks that share one vLLM engine
    --vllm_gpu_memory_utilization 0.4        # share of the GPU memory for vLLM
    --vllm_max_model_len 4096                # max_length + max_completion_length
    --sleep_level 2                          # vLLM frees all memory while training
    --offload_model true                     # weights may be offloaded during generation, if not everything fits
    --offload_optimizer true                 # optimizer states as well

    # Optimization.
    --train_iters 500                        # optimizer steps
    --lr 1e-6                                # learning rate
    --beta 0                                 # no KL to the initial policy: the teacher is the only guide

    # Output.
    --output_dir "${OUTPUT:-output}"         # logs and checkpoints
    --save_steps 50                          # steps between checkpoints
    --logging_steps 1                        # log every step
    --log_completions true                   # write completions to a file
)
exec megatron rlhf "${args[@]}" "$@"
