#!/usr/bin/env bash
# GRPO on two CPU ranks: tensor and sequence parallel training, vLLM in the same processes. The command is the one for GPUs;
# what a line changes there is said beside it.
#   MODEL=folder DATASET=file.jsonl OUTPUT=folder templates/cpu_quickstart.sh [more flags, which win]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# Ranks on this machine. On GPUs: how many there are.
export NPROC_PER_NODE=${NPROC_PER_NODE:-2}
# Two runs on one machine need two ports.
export MASTER_PORT=${MASTER_PORT:-$((20000 + RANDOM % 20000))}
# CPU only: one thread a rank, or the ranks fight over the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# The model is local. Leave these out to load one from a hub.
export HF_HUB_OFFLINE=1 MODELSCOPE_OFFLINE=1

args=(
    --rlhf_type grpo

    # The model. The tiny one is a Qwen3 by its architecture and not by its name, so it is told; a real checkpoint is
    # recognised: leave model_type and template out.
    --model "$MODEL"
    --model_type qwen3
    --template chatml
    --torch_dtype bfloat16
    --tuner_type full               # or lora, with --lora_rank, --lora_alpha, --target_modules

    # The layout: ranks = TP * PP * CP * DP.
    --tensor_model_parallel_size 2
    --sequence_parallel true
    --ddp_backend gloo              # GPUs: leave it out, the default is NCCL
    --recompute_granularity none    # GPUs: selective or full, when memory is short

    # The task.
    --dataset "$DATASET"
    --split_dataset_ratio 0
    --load_from_cache_file false
    --external_plugins "$here/plugins/letters.py"
    --reward_funcs letters

    # Batch sizes count completions: 4 prompts with 8 completions each are a step.
    --num_generations 8
    --global_batch_size 32
    --micro_batch_size 4
    --max_length 256                # of the prompt
    --max_completion_length 24
    --temperature 1.0

    # Generation in the training processes.
    --use_vllm true
    --vllm_mode colocate
    --vllm_max_model_len 512
    --vllm_gpu_memory_utilization 0.3
    --vllm_enforce_eager true       # GPUs: leave it out, CUDA graphs are faster
    --sleep_level 0                 # GPUs: 1 or 2; offload_model, offload_optimizer, offload_grad: what may make room
    --offload_model false
    --offload_optimizer false

    # The optimisation. The learning rate suits a model of 0.2 million weights; a real one takes 1e-6.
    --train_iters 30
    --lr 5e-3
    --lr_decay_style constant
    --beta 0                        # no KL term, so no reference model

    # What is written.
    --output_dir "$OUTPUT"
    --add_version false
    --logging_steps 1
    --save_strategy steps
    --save_steps 1000               # and once at the end
    --no_save_optim true
    --no_save_rng true
    --dataset_num_proc 1
    --dataloader_num_workers 0
)
exec megatron rlhf "${args[@]}" "$@"
