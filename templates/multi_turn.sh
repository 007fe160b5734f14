#!/usr/bin/env bash
# GRPO on conversations of several turns with an environment, all weights.
#   MODEL=Qwen/Qwen3-1.7B DATASET=data.jsonl OUTPUT=output templates/multi_turn.sh [more flags, which win]
# vLLM runs in the training processes, and environments live there. With vLLM and environments in a process and on GPUs
# of their own: `multi_turn.sh server`, or in two terminals `multi_turn.sh serve` and `multi_turn.sh train`.
# DATASET: one json object a line with `messages`, and what the environment reads of the row.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

MODEL=${MODEL:-Qwen/Qwen3-1.7B}
SERVER_GPUS=${SERVER_GPUS-0}        # of server, serve and train; empty: no GPUs, as on a laptop
TRAIN_GPUS=${TRAIN_GPUS-1,2}
SERVER=${SERVER:-http://127.0.0.1:8000}   # between machines see dense_server.sh

# The environment: a file of yours that registers it. ms-swift's gym_scheduler asks it for each next turn, and the sum of
# its rewards is the completion's. --reward_funcs may add functions; they get `rollout_infos` and all `messages`.
turns=(
    --external_plugins "$here/plugins/spelling.py"
    --multi_turn_scheduler gym_scheduler
    --gym_env spelling
    --max_turns 3
)

# A turn may take max_completion_length tokens. The whole conversation ends where this does.
room=(--vllm_max_model_len 2048)

colocate=(
    --vllm_mode colocate
    "${room[@]}"
    --vllm_tensor_parallel_size 1
    --vllm_gpu_memory_utilization 0.4
    --sleep_level 2
    --offload_model true
    --offload_optimizer true
)

serve() {
    local args=(
        --model "$MODEL"
        --host "${LISTEN:-127.0.0.1}"
        --port "${SERVER##*:}"
        --torch_dtype bfloat16
        --vllm_gpu_memory_utilization 0.9
        "${turns[@]}"
        "${room[@]}"
    )
    CUDA_VISIBLE_DEVICES=$SERVER_GPUS exec swift rollout "${args[@]}" ${SERVER_FLAGS:-}
}

train() {
    export NPROC_PER_NODE=${NPROC_PER_NODE:-2}
    export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
    local args=(
        --rlhf_type grpo
        --model "$MODEL"
        --torch_dtype bfloat16
        --tuner_type full
        --tensor_model_parallel_size 2
        --sequence_parallel true
        --attention_backend flash   # fused (cuDNN) where flash-attn is not installed
        --recompute_granularity selective

        --dataset "$DATASET"
        "${turns[@]}"               # a server must have been started with the same
        --max_length 512
        --max_completion_length 256

        # Conversations differ in length more than completions do.
        --max_tokens_per_micro_batch 8192

        --num_generations 8
        --global_batch_size 64
        --temperature 1.0
        --use_vllm true

        --num_train_epochs 1
        --lr 1e-6
        --beta 0

        --output_dir "${OUTPUT:-output}"
        --save_steps 50
        --logging_steps 1
        --log_completions true
    )
    exec megatron rlhf "${args[@]}" "$@"
}

train_with_server() {
    local servers
    read -ra servers <<<"$SERVER"
    export CUDA_VISIBLE_DEVICES=$TRAIN_GPUS
    train --vllm_mode server --vllm_server_base_url "${servers[@]}" --vllm_server_timeout 600 "$@"
}

case "${1:-}" in
serve) serve ;;
train) shift && train_with_server "$@" ;;
server)
    shift
    set -m # a process group of its own, because `swift` starts the server as a child
    (serve) &
    server=$!
    set +m
    trap 'kill -- "-$server" 2>/dev/null; wait "$server" || true' EXIT
    (train_with_server "$@") # which waits for the server
    ;;
*) train "${colocate[@]}" "$@" ;;
esac
