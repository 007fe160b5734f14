#!/usr/bin/env bash
# GRPO of a LoRA adapter on a mixture of experts, with vLLM in a separate process whose GPUs share the experts.
#   MODEL=Qwen/Qwen3-30B-A3B-Instruct-2507 DATASET=data.jsonl OUTPUT=output templates/moe_server.sh [trainer flags]
# Two GPUs generate and two train, as was measured on H200s. For H100s of 80 GB: TOKENS=6144.
# All other flags, and how to start servers separately (`moe_server.sh serve`), are in dense_server.sh.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

command=both
case "${1:-}" in
serve | train | both) command=$1 && shift ;;
esac

export MODEL=${MODEL:-Qwen/Qwen3-30B-A3B-Instruct-2507}
export SERVER_GPUS=${SERVER_GPUS-0,1} TRAIN_GPUS=${TRAIN_GPUS-2,3} SERVER_TP=${SERVER_TP:-2}
# Each GPU of the server has whole experts instead of a slice of every expert.
export SERVER_FLAGS="--vllm_enable_expert_parallel true ${SERVER_FLAGS:-}"

moe=(
    --tuner_type lora                        # train an adapter; merged weights are sent
    --lora_rank 16                           # rank of the adapter matrices
    --lora_alpha 32                          # the adapter is scaled by alpha / rank
    --lora_dropout 0                         # dropout would make the trained policy differ from the one that generated
    --target_modules all-linear              # layers with an adapter: experts as well, but not the router
    --lr 1e-5                                # ten times the learning rate of full-parameter training
    --tensor_model_parallel_size 1           # TP: each rank has whole layers, apart from experts
    --sequence_parallel false                # which is for TP
    --expert_model_parallel_size 2           # EP: ranks that share the experts of a layer
    --max_tokens_per_micro_batch "${TOKENS:-12288}" # of one forward and backward pass; less needs less memory
    --moe_grouped_gemm true                  # one matrix product for all experts of a rank
    --moe_permute_fusion true                # fused kernels that sort tokens by expert
)
[ "$command" != serve ] || exec "$here/dense_server.sh" serve "$@"
exec "$here/dense_server.sh" "$command" "${moe[@]}" "$@"
