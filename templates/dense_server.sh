#!/usr/bin/env bash
# Full-parameter GRPO of a dense model, with vLLM in a separate process on separate GPUs.
#   MODEL=Qwen/Qwen3-8B DATASET=data.jsonl OUTPUT=output templates/dense_server.sh [more flags for the trainer, which win]
# Starts both on one machine. In two terminals, or on two machines: `dense_server.sh serve`, then `dense_server.sh train`.
# Between machines also set LISTEN=0.0.0.0 on the server and SWIFT_ROLLOUT_API_KEY on both ends: see docs/security.md.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-8B}
SERVER_GPUS=${SERVER_GPUS-0,1}      # empty: no GPUs, as on a laptop
TRAIN_GPUS=${TRAIN_GPUS-2,3,4,5,6,7}
SERVER=${SERVER:-http://127.0.0.1:8000}   # several of them: SERVER="http://gpu1:8000 http://gpu2:8000"

serve() {
    local args=(
        --model "$MODEL"
        --host "${LISTEN:-127.0.0.1}"
        --port "${SERVER##*:}"
        --torch_dtype bfloat16
        --vllm_tensor_parallel_size "${SERVER_TP:-2}"
        --vllm_max_model_len 6144   # at least max_length + max_completion_length of the trainer
        --vllm_gpu_memory_utilization 0.9
    )
    CUDA_VISIBLE_DEVICES=$SERVER_GPUS exec swift rollout "${args[@]}" ${SERVER_FLAGS:-}
}

train() {
    local gpus=${TRAIN_GPUS//[^,]/}
    export NPROC_PER_NODE=${NPROC_PER_NODE:-$((${#gpus} + 1))}
    local servers
    read -ra servers <<<"$SERVER"
    local args=(
        --rlhf_type grpo
        --model "$MODEL"
        --torch_dtype bfloat16
        --tuner_type full

        # The layout: ranks = TP * PP * CP * DP.
        --tensor_model_parallel_size 2
        --sequence_parallel true
        --attention_backend flash   # fused (cuDNN) where flash-attn is not installed
        --recompute_granularity selective

        --dataset "$DATASET"
        --load_from_cache_file true
        --reward_funcs accuracy format

        # Batch sizes count completions. A rollout: 192 = 24 prompts * 8. An optimizer step: 96, so two steps a rollout.
        --num_generations 8
        --global_batch_size 96
        --steps_per_generation 2
        --micro_batch_size 4
        --max_length 2048           # of the prompt
        --max_completion_length 4096
        --temperature 1.0

        --vllm_mode server
        --vllm_server_base_url "${servers[@]}"
        --vllm_server_timeout 600   # seconds that a server may take to start, or to come back
        # --seed_completions true   # the same completions whoever makes them; slower sampling

        --num_train_epochs 1
        --lr 1e-6
        --lr_warmup_fraction 0.05
        --beta 0                    # weight of the KL to the reference; 0: no reference model exists
        --epsilon 0.2
        --epsilon_high 0.28

        --output_dir "${OUTPUT:-output}"
        --save_steps 50
        --save_total_limit 3
        --logging_steps 1
        --log_completions true
        --report_to tensorboard     # or wandb, swanlab, none
    )
    CUDA_VISIBLE_DEVICES=$TRAIN_GPUS exec megatron rlhf "${args[@]}" "$@"
}

case "${1:-both}" in
serve) serve ;;
train) shift && train "$@" ;;
*)
    [ "${1:-}" != both ] || shift
    set -m # a process group of its own, because `swift` starts the server as a child
    (serve) &
    server=$!
    set +m
    trap 'kill -- "-$server" 2>/dev/null; wait "$server" || true' EXIT
    (train "$@") # which waits for the server
    ;;
esac
