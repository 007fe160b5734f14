#!/usr/bin/env bash
# GRPO whose rewards come from a larger model that judges every completion, behind its own server.
#   vllm serve Qwen/Qwen3-32B --port 8001        # on other GPUs; any server with OpenAI's routes will do
#   MODEL=Qwen/Qwen3-1.7B JUDGE=http://HOST:8001 DATASET=data.jsonl OUTPUT=output templates/judge.sh [flags]
# DATASET: one JSON object per line, with `messages`. See docs/reward_models.md.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# Number of ranks on this machine. On several machines also set NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT.
export NPROC_PER_NODE=${NPROC_PER_NODE:-4}
# Avoid memory fragmentation when vLLM and the trainer use the GPU alternately.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

args=(
    --rlhf_type grpo                         # the algorithm
    --model "${MODEL:-Qwen/Qwen3-1.7B}"      # hub name or folder
    --torch_dtype bfloat16                   # precision of weights and activations

    # The judge. Functions of --reward_funcs are added to it, by --reward_weights.
    --external_plugins "$here/plugins/helpful_judge.py" # makes the requests and reads the grades; edit it
    --reward_model "${JUDGE:-http://127.0.0.1:8001}/v1/chat/completions" # its server, with the route
    --reward_model_plugin helpful            # name of the plugin
    --reward_model_timeout 300               # seconds for one completion, with new tries
    --bad_reward drop                        # a completion without a grade is left out, and does not end the run

    # Parallel layout: ranks = TP * PP * CP * DP.
    --tensor_model_parallel_size 2           # TP: ranks that share each layer
    --sequence_parallel true                 # divide activations between TP ranks as well
    --attention_backend flash                # without flash-attn: torch's kernel, or fused (cuDNN)
    --recompute_granularity none             # to save memory: full, which takes a third more FLOPs

    # Data.
    --dataset "${DATASET:?set a file or hub name}" # one JSON object per line, with `messages`

    # Batch sizes count completions.
    --num_generations 8                      # completions per prompt, which are compared
    --global_batch_size 64                   # completions per optimizer step
    --max_tokens_per_micro_batch 16384       # tokens of one forward and backward pass; less needs less memory
    --max_length 2048                        # tokens of a prompt, at most
    --max_completion_length 2048             # tokens of a completion, at most
    --temperature 1.0                        # of sampling

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
    --beta 0.02                              # KL to the initial policy: judges can be deceived

    # Output.
    --output_dir "${OUTPUT:-output}"         # logs and checkpoints
    --save_steps 50                          # steps between checkpoints
    --logging_steps 1                        # log every step
    --log_completions true                   # write completions to a file
)
exec megatron rlhf "${args[@]}" "$@"
