#!/usr/bin/env bash
# Run groups of bench_h200.sh so that no GPU waits for a start: one group measures while others start.
#   benchmarks/bench_lanes.sh GPU:"GROUP..." GPU:"GROUP..."
#   benchmarks/bench_lanes.sh 0:"moe step-best" 0:"lora-8b" 1:"vl-qwen3"
#   benchmarks/bench_lanes.sh 0/0-15:"step-best@400 server-1.7b" 1/16-31:"step-lora-8b"
# The groups of an argument run one after the other, those of different arguments side by side: a lock lets one process
# at a time use each GPU. A process that waits takes a core and 4 GB of host memory. Groups for several GPUs name them
# all, as in 0,1:two. After a slash: the cores of the lane, so that those that start do not disturb those that measure.
# GROUP@SECONDS: no more than this many.
#   DEADLINE=1500       seconds for all; a group that has less than a minute left is not started
#   LOGS=folder         folder for the logs of the groups (default: runs/bench/logs)
# OUT, WORK, ROUNDS and DRY are those of bench_h200.sh.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
logs=${LOGS:-$here/../runs/bench/logs}
end=$((SECONDS + ${DEADLINE:-1500}))
mkdir -p "$logs"

run_in_turn() { # run_in_turn GPU[/CORES] GROUP[@SECONDS]...
    local group left limit pinned=()
    export CUDA_VISIBLE_DEVICES=${1%%/*}
    [[ $1 != */* ]] || pinned=(taskset -c "${1#*/}")
    for group in "${@:2}"; do
        left=$((end - SECONDS)) limit=${group#*@} group=${group%%@*}
        [[ $limit =~ ^[0-9]+$ && $limit -lt $left ]] || limit=$left
        if [ $left -lt 60 ]; then
            echo "== $group: no time left"
            continue
        fi
        echo "== $group: on GPU $CUDA_VISIBLE_DEVICES, $SECONDS s since the start, $limit s left"
        # `timeout` ends what does not keep the deadline itself, as a benchmark does within 45 s; it passes the signal on
        # to the whole group.
        DEADLINE=$limit timeout $((limit + 60)) "${pinned[@]}" "$here/bench_h200.sh" "$group" >"$logs/$group.log" 2>&1 ||
            echo "== $group failed"
        grep -E '^(ours|stock|trl|verl|each|equal|==|in_process|server|default|fp8[a-z_]*|graphs_alone|no_prefix|first|cascade|[0-9]+ passed) ' \
            "$logs/$group.log" || true
    done
}

for lane in "$@"; do
    [[ $lane == *:* ]] || { echo "bench_lanes: $lane: write GPU:\"GROUP...\", as in 0:\"$lane\"" >&2; exit 2; }
    read -ra groups <<<"${lane#*:}"
    run_in_turn "${lane%%:*}" "${groups[@]}" &
    sleep 5 # the first argument's first group goes first
done
wait
