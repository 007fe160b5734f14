#!/usr/bin/env bash
# Full-parameter GRPO of a dense model. The next rollout is generated while one is trained: see docs/async.md.
#   MODEL=Qwen/Qwen3-8B DATASET=data.jsonl OUTPUT=output templates/async_server.sh [more flags for the trainer, which win]
# Everything else, and how to start servers by themselves (`async_server.sh serve`), is in dense_server.sh.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

what=both
case "${1:-}" in
serve | train | both) what=$1 && shift ;;
esac

ahead=(
    --async_generate true
    --max_staleness 1           # rollouts; 0: generation and training take turns
    # Completions are weighed by how far the policy has moved since they were sampled. Left out: the ratio says it.
    --rollout_importance_sampling_mode token_truncate
    --rollout_importance_sampling_threshold 2
)

# time/generation in the log is how long training waits. If it is long, servers need more of the GPUs (SERVER_GPUS,
# TRAIN_GPUS); if it is 0, they may do with fewer.
exec "$here/dense_server.sh" "$what" "${ahead[@]}" "$@"
