#!/usr/bin/env bash
# Full-parameter GRPO on multi-turn conversations with an environment.
#   MODEL=Qwen/Qwen3-1.7B DATASET=data.jsonl OUTPUT=output templates/multi_turn.sh [flags that override these]
# vLLM and the environments run in the training processes. To run them in a separate process on separate GPUs, use
# `multi_turn.sh server`, or `multi_turn.sh serve` and `multi_turn.sh train` in two terminals. SERVER_FLAGS holds
# further flags of the server.
# DATASET: one JSON object per line, with `messages` and the columns that the environment reads.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

MODEL=${MODEL:-Qwen/Qwen3-1.7B}
# GPUs of the server and of the trainer, with server, serve and train. Empty values run on the CPU.
SERVER_GPUS=${SERVER_GPUS-0}
TRAIN_GPUS=${TRAIN_GPUS-1,2}
# Address of the server. Between machines see dense_server.sh.
SERVER=${SERVER:-http://127.0.0.1:8000}

# Environment. ms-swift's gym_scheduler requests every turn from it, and the sum of its rewards is the reward of the
# completion. Functions in --reward_funcs are added to it; they receive `rollout_infos` and all `messages`.
turns=(
    --external_plugins "$here/plugins/spelling.py" # registers the environment; replace it with your own file
    --multi_turn_scheduler gym_scheduler     # runs the conversations
    --gym_env spelling                       # name of the environment
    --max_turns 3                            # turns of a conversation, at most
)

# Maximum number of tokens of a whole conversation. Each turn may have max_completion_length tokens.
max_tokens=(--vllm_max_model_len 2048)

colocate=(
    --vllm_mode colocate                     # vLLM runs in the training processes
    "${max_tokens[@]}"
    --vllm_tensor_parallel_size 1            # ranks that share one vLLM engine
    --vllm_gpu_memory_utilization 0.4        # share of the GPU memory for vLLM
    --sleep_level 2                          # vLLM frees all memory while training; each sync resends the weights
    --offload_model true                     # weights may be offloaded during generation, if not everything fits
    --offload_optimizer true                 # the same for optimizer states
)

serve() {
    local args=(
        --model "$MODEL"                         # the same as for the trainer
        --host "${LISTEN:-127.0.0.1}"            # address to listen on
        --port "${SERVER##*:}"                   # port to listen on
        --torch_dtype bfloat16                   # precision of weights and activations
        --vllm_gpu_memory_utilization 0.9        # share of the GPU memory for vLLM
        "${turns[@]}"
        "${max_tokens[@]}"
    )
    CUDA_VISIBLE_DEVICES=$SERVER_GPUS exec swift rollout "${args[@]}" ${SERVER_FLAGS:-} "$@"
}

train() {
    # Number of ranks on this machine.
    export NPROC_PER_NODE=${NPROC_PER_NODE:-2}
    # Avoid memory fragmentation when vLLM and the trainer use the GPU alternately.
    export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
    local args=(
        --rlhf_type grpo                         # the algorithm
        --model "$MODEL"                         # hub name or folder
        --torch_dtype bfloat16                   # precision of weights and activations
        --tuner_type full                        # train all weights

        # Parallel layout: ranks = TP * PP * CP * DP.
        --tensor_model_parallel_size 2           # TP: ranks that share each layer
        --sequence_parallel true                 # divide activations between TP ranks as well
        --attention_backend flash                # without flash-attn: torch's kernel, or fused (cuDNN)
        --recompute_granularity none             # to save memory: full, which takes a third more FLOPs

        # Data and environment.
        --dataset "${DATASET:?set a file or hub name}" # one JSON object per line, with `messages`
        "${turns[@]}"                            # servers must be started with the same
        --max_length 512                         # tokens of the first prompt, at most
        --max_completion_length 256              # tokens of a turn of the model, at most

        # Tokens per forward and backward pass. A token budget suits conversations better than a number of sequences,
        # because their lengths differ more than those of single completions.
        --max_tokens_per_micro_batch 8192

        --num_generations 8                      # completions per prompt
        --global_batch_size 64                   # completions per optimizer step
        --temperature 1.0                        # of sampling
        --use_vllm true                          # generate with vLLM

        # Optimization.
        --train_iters 500                        # optimizer steps
        --lr 1e-6                                # learning rate
        --beta 0                                 # weight of the KL term; with 0 there is no reference model

        # Output.
        --output_dir "${OUTPUT:-output}"         # logs and checkpoints
        --save_steps 50                          # steps between checkpoints
        --logging_steps 1                        # log every step
        --log_completions true                   # write completions and rewards to a file
    )
    exec megatron rlhf "${args[@]}" "$@"
}

train_with_server() {
    local servers gpus=${TRAIN_GPUS//[^,]/}
    read -ra servers <<<"$SERVER"
    export CUDA_VISIBLE_DEVICES=$TRAIN_GPUS NPROC_PER_NODE=${NPROC_PER_NODE:-$((${#gpus} + 1))}
    train --vllm_mode server --vllm_server_base_url "${servers[@]}" --vllm_server_timeout 600 "$@"
}

case "${1:-}" in
serve) shift && serve "$@" ;;
train) shift && train_with_server "$@" ;;
server | both)
    shift
    [[ " $* " != *" --check true "* ]] || train_with_server "$@" # a check needs no server
    set -m # gives the server its own process group, because `swift` starts it as a child process
    (serve) &
    server=$!
    set +m
    trap 'kill -- "-$server" 2>/dev/null; wait "$server" || true' EXIT
    (train_with_server "$@") # waits for the server
    ;;
*) train "${colocate[@]}" "$@" ;;
esac
