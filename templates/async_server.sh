#!/usr/bin/env bash
# Full-parameter GRPO of a dense model, with the next rollout generated while one is trained. See docs/async.md.
#   MODEL=Qwen/Qwen3-8B DATASET=data.jsonl OUTPUT=output templates/async_server.sh [trainer flags that override these]
# All other flags, and how to start servers separately (`async_server.sh serve`), are in dense_server.sh.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

command=both
case "${1:-}" in
serve | train | both) command=$1 && shift ;;
esac

async=(
    --async_generate true                    # generate the next rollout while one is trained
    --max_staleness 1                        # rollouts that generation may be ahead; with 0 both alternate
    # With long tails, and one server for each GPU: --max_staleness 2 --in_flight_weight_updates true
    # Weight each token by how far the policy has moved since it was sampled, at most by the threshold. Without these
    # flags only the ratio of the loss accounts for it.
    --rollout_importance_sampling_mode token_truncate
    --rollout_importance_sampling_threshold 2
)

# time/generation in the log is the time that training waits for completions. If it is long, give the servers more of
# the GPUs (SERVER_GPUS, TRAIN_GPUS); if it is 0, they may need fewer.
[ "$command" != serve ] || exec "$here/dense_server.sh" serve "$@"
exec "$here/dense_server.sh" "$command" "${async[@]}" "$@"
