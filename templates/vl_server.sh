#!/usr/bin/env bash
# Full-parameter GRPO of a model that sees, image part included, with vLLM in a separate process on separate GPUs.
#   MODEL=Qwen/Qwen3-VL-8B-Instruct DATASET=data.jsonl OUTPUT=output templates/vl_server.sh [trainer flags]
# DATASET: one JSON object per line, with `messages` (an <image> for each image), `images` (paths, URLs or base64; the
# trainer reads them and sends them to the server) and the columns that the reward functions read.
# Starts server and trainer on one machine. To start them in two terminals or on two machines, run
# `vl_server.sh serve` and then `vl_server.sh train`. Between machines also set LISTEN=0.0.0.0 on the server and
# SWIFT_ROLLOUT_API_KEY on both ends: see docs/security.md. SERVER_FLAGS holds further flags of the server.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-VL-8B-Instruct}
# Larger images are scaled down, by server and trainer alike: 576 tokens of 32 x 32 pixels.
MAX_PIXELS=${MAX_PIXELS:-589824}
# The most images in a prompt.
IMAGES=${IMAGES:-1}
# GPUs of the server and of the trainer. Empty values run on the CPU.
SERVER_GPUS=${SERVER_GPUS-0,1}
TRAIN_GPUS=${TRAIN_GPUS-2,3,4,5,6,7}
# Address of the server. For several servers: SERVER="http://gpu1:8000 http://gpu2:8000"
SERVER=${SERVER:-http://127.0.0.1:8000}

serve() {
    local args=(
        --model "$MODEL"                         # the same as for the trainer
        --host "${LISTEN:-127.0.0.1}"            # address to listen on
        --port "${SERVER##*:}"                   # port to listen on
        --torch_dtype bfloat16                   # precision of weights and activations
        --vllm_tensor_parallel_size "${SERVER_TP:-2}" # GPUs that share one vLLM engine
        --max_pixels "$MAX_PIXELS"               # the same as for the trainer
        --vllm_limit_mm_per_prompt "{\"image\": $IMAGES, \"video\": 0}" # what vLLM plans memory for
        --vllm_max_model_len 6144                # tokens of a prompt, its images and a completion
        --vllm_gpu_memory_utilization 0.9        # share of the GPU memory for vLLM
    )
    CUDA_VISIBLE_DEVICES=$SERVER_GPUS exec swift rollout "${args[@]}" ${SERVER_FLAGS:-} "$@"
}

train() {
    local gpus=${TRAIN_GPUS//[^,]/}
    export NPROC_PER_NODE=${NPROC_PER_NODE:-$((${#gpus} + 1))}
    local servers
    read -ra servers <<<"$SERVER"
    local args=(
        --rlhf_type grpo                         # the algorithm
        --model "$MODEL"                         # hub name or folder
        --torch_dtype bfloat16                   # precision of weights and activations
        --tuner_type full                        # train all weights of the parts that are not frozen
        --freeze_vit false                       # train the image part; true: keep it as it is
        --freeze_aligner false                   # train what connects it to the language model
        --vit_lr 2e-7                            # learning rate of the image part, lower than that of the rest

        # Parallel layout: ranks = TP * PP * CP * DP.
        --tensor_model_parallel_size 2           # TP: ranks that share each layer
        --sequence_parallel true                 # divide activations between TP ranks as well
        --attention_backend flash                # without flash-attn: torch's kernel, or fused (cuDNN)
        --recompute_granularity none             # to save memory: full, which takes a third more FLOPs
        --vit_gradient_checkpointing true        # recompute the image part in backward

        # Data and rewards.
        --dataset "${DATASET:?set a file or hub name}" # one JSON object per line, with `messages` and `images`
        --max_pixels "$MAX_PIXELS"               # of one image
        --load_from_cache_file true              # reuse the preprocessed dataset of an earlier run
        --reward_funcs accuracy                  # needs pip install ".[math]" and a column `solution`

        # Batch sizes count completions. A rollout has 192 = 24 prompts * 8 and is trained in two optimizer steps of 96.
        --num_generations 8                      # completions per prompt
        --global_batch_size 96                   # completions per optimizer step
        --steps_per_generation 2                 # optimizer steps per rollout
        --max_tokens_per_micro_batch 16384       # tokens of one forward and backward pass; less needs less memory
        --max_length 1024                        # tokens of a prompt, an image counting as one
        --max_completion_length 4096             # tokens of a completion, at most
        --temperature 1.0                        # of sampling

        # Generation in the servers. Add --seed_completions true to make completions independent of the server that
        # generates them; sampling is then slower.
        --vllm_mode server                       # vLLM runs in `swift rollout`
        --vllm_server_base_url "${servers[@]}"   # addresses of the servers
        --vllm_server_timeout 600                # seconds to wait for a server that starts or restarts

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
    CUDA_VISIBLE_DEVICES=$TRAIN_GPUS exec megatron rlhf "${args[@]}" "$@"
}

case "${1:-both}" in
serve) shift && serve "$@" ;;
train) shift && train "$@" ;;
*)
    [ "${1:-}" != both ] || shift
    [[ " $* " != *" --check true "* ]] || train "$@" # a check needs no server
    set -m # gives the server its own process group, because `swift` starts it as a child process
    (serve) &
    server=$!
    set +m
    trap 'kill -- "-$server" 2>/dev/null; wait "$server" || true' EXIT
    (train "$@") # waits for the server
    ;;
esac
