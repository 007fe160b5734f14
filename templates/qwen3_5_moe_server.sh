#!/usr/bin/env bash
# GRPO of a LoRA adapter on the Qwen3.5 mixture of experts with text rows, with vLLM in a separate process.
#   MODEL=Qwen/Qwen3.5-35B-A3B DATASET=data.jsonl OUTPUT=output templates/qwen3_5_moe_server.sh [trainer flags]
# All other flags, and how to start servers separately (`qwen3_5_moe_server.sh serve`), are in dense_server.sh. On GPUs
# it needs flash-linear-attention, which pip install "swift-megatron-grpo[gpu]" brings.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

command=both
case "${1:-}" in
serve | train | both) command=$1 && shift ;;
esac

export MODEL=${MODEL:-Qwen/Qwen3.5-35B-A3B}
export SERVER_GPUS=${SERVER_GPUS-0,1,2,3} TRAIN_GPUS=${TRAIN_GPUS-4,5,6,7} SERVER_TP=${SERVER_TP:-4}
# The server leaves the image part out, and the trainer does not send it. No spaces: the shell splits SERVER_FLAGS.
export SERVER_FLAGS="--vllm_limit_mm_per_prompt {\"image\":0,\"video\":0} ${SERVER_FLAGS:-}"

moe=(
    --tuner_type lora                        # train an adapter; merged weights are sent
    --lora_rank 16                           # rank of the adapter matrices
    --lora_alpha 32                          # the adapter is scaled by alpha / rank
    --target_modules all-linear              # layers with an adapter: those of the language model alone
    --lr 1e-5                                # ten times the learning rate of full-parameter training
    --expert_model_parallel_size 4           # EP: ranks that share the experts of a layer
    --moe_grouped_gemm true                  # one matrix product for all experts of a rank
)
exec "$here/dense_server.sh" "$command" "${moe[@]}" "$@"
