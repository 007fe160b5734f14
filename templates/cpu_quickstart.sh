#!/usr/bin/env bash
# GRPO on two CPU ranks: tensor and sequence parallel training, with vLLM in the same processes.
#   MODEL=folder DATASET=file.jsonl OUTPUT=folder templates/cpu_quickstart.sh [flags that override these]
# The same command trains on GPUs. Comments that begin with "GPUs:" describe what to change there.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# Number of ranks on this machine. GPUs: the number of GPUs.
export NPROC_PER_NODE=${NPROC_PER_NODE:-2}
# Port of torchrun; two runs on one machine need different ports.
export MASTER_PORT=${MASTER_PORT:-$((20000 + RANDOM % 20000))}
# CPU only: one thread per rank, so that ranks do not compete for cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Use local files only. Remove this line to load the model from a hub.
export HF_HUB_OFFLINE=1 MODELSCOPE_OFFLINE=1

args=(
    --rlhf_type grpo                         # the algorithm

    # Model. ms-swift recognises a real checkpoint by its name; the tiny model has none, so its type is given here.
    --model "$MODEL"                         # folder of the checkpoint
    --model_type qwen3                       # real checkpoint: leave it out
    --template chatml                        # real checkpoint: leave it out
    --torch_dtype bfloat16                   # precision of weights and activations
    --tuner_type full                        # or lora, with --lora_rank, --lora_alpha, --target_modules

    # Parallel layout: ranks = TP * PP * CP * DP.
    --tensor_model_parallel_size 2           # TP: ranks that share each layer
    --sequence_parallel true                 # divide activations between TP ranks as well
    --ddp_backend gloo                       # GPUs: leave it out; the default is NCCL
    --recompute_granularity none             # GPUs: selective or full, to save memory

    # Data and reward.
    --dataset "$DATASET"                     # one JSON object per line, with `messages`
    --split_dataset_ratio 0                  # no validation set
    --load_from_cache_file false             # preprocess the dataset again in every run
    --external_plugins "$here/plugins/letters.py" # registers the reward function `letters`
    --reward_funcs letters                   # the reward: share of lower-case letters

    # Batch sizes count completions: a step trains 4 prompts with 8 completions each.
    --num_generations 8                      # completions per prompt
    --global_batch_size 32                   # completions per optimizer step
    --micro_batch_size 4                     # completions per forward and backward pass
    --max_length 256                         # tokens of a prompt, at most
    --max_completion_length 24               # tokens of a completion, at most
    --temperature 1.0                        # of sampling

    # Generation with vLLM in the training processes.
    --use_vllm true                          # generate with vLLM
    --vllm_mode colocate                     # vLLM runs in the training processes
    --vllm_max_model_len 512                 # tokens of prompt and completion
    --vllm_gpu_memory_utilization 0.3        # share of the memory for vLLM
    --vllm_enforce_eager true                # GPUs: leave it out; CUDA graphs are faster
    --sleep_level 0                          # GPUs: 1 or 2, so that vLLM frees its memory while training
    --offload_model false                    # GPUs: true, if weights may be offloaded to make room for vLLM
    --offload_optimizer false                # GPUs: true, if optimizer states may be offloaded as well

    # Optimization. The learning rate suits 0.2 million weights; use 1e-6 for a real model.
    --train_iters 30                         # optimizer steps
    --lr 5e-3                                # learning rate
    --lr_decay_style constant                # schedule of the learning rate
    --beta 0                                 # no KL term, so no reference model is needed

    # Output.
    --output_dir "$OUTPUT"                   # logs and checkpoints
    --add_version false                      # write to this folder itself, not to a new one inside it
    --logging_steps 1                        # log every step
    --save_strategy steps                    # save by number of steps
    --save_steps 1000                        # steps between checkpoints; there is also one at the end
    --no_save_optim true                     # checkpoints without optimizer states
    --no_save_rng true                       # checkpoints without random number states
    --dataset_num_proc 1                     # processes that preprocess the dataset
    --dataloader_num_workers 0               # load data in the training processes
)
exec megatron rlhf "${args[@]}" "$@"
