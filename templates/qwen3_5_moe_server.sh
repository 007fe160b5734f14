#!/usr/bin/env bash
# GRPO of a LoRA adapter on the Qwen3.5 mixture of experts with text rows, with vLLM in a separate process.
#   MODEL=Qwen/Qwen3.5-35B-A3B DATASET=data.jsonl OUTPUT=output templates/qwen3_5_moe_server.sh [trainer flags]
# Two GPUs generate and two train. All other flags are in moe_server.sh and dense_server.sh, and the latter describes how
# to start servers separately (`qwen3_5_moe_server.sh serve`). On GPUs it needs flash-linear-attention, which
# pip install ".[gpu]" brings.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export MODEL=${MODEL:-Qwen/Qwen3.5-35B-A3B} TOKENS=${TOKENS:-8192}
# The server leaves the image part out, and the trainer does not send it. No spaces: the shell splits SERVER_FLAGS.
export SERVER_FLAGS="--vllm_limit_mm_per_prompt {\"image\":0,\"video\":0} ${SERVER_FLAGS:-}"
exec "$here/moe_server.sh" "$@"
