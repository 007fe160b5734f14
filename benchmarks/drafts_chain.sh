#!/usr/bin/env bash
# Train SmolLM2 with drafts and without, several runs at a time on each GPU, and then time 8B, alone on each GPU. What
# was measured is left out, and nothing starts that is unlikely to end in time, so that several short rentals share the
# work.
#   benchmarks/drafts_chain.sh MODEL WORK OUT SECONDS [OPTION...]
# MODEL: folder of SmolLM2; WORK: data and logs; OUT: results, and those of earlier rentals; OPTION: of `drafts run`.
#   GPUS="0 1"    GPUs (default: all), or cpu for a dry run
#   LANES=2       runs at a time on each GPU
#   ITEMS="..."   TASK:DTYPE:MODE:SECONDS of each run, SECONDS with its start (default: all twelve). Those with drafts
#                 and without are neighbours, so that they run side by side
#   TIMES="..."   SHAPE:REQUESTS:SECONDS of each timing (default: 8B with 64 and 128), when the ITEMS have ended
#   TIMED="..."   options of `drafts generate`
#   RESERVE=N     seconds that ITEMS leave to TIMES
set -euo pipefail
model=$(cd "$1" && pwd) # alone, because of several only the last one ends the chain
work=$(mkdir -p "$2" && cd "$2" && pwd) out=$(mkdir -p "$3" && cd "$3" && pwd) end=$((SECONDS + $4))
shift 4
cd "$(dirname "${BASH_SOURCE[0]}")/.."
read -ra gpus <<< "${GPUS:-$(nvidia-smi --query-gpu=index --format=csv,noheader | xargs)}"
cores=$(($(nproc) / $([ "${gpus[0]}" = cpu ] && echo 1 || nvidia-smi -L | wc -l))) # of each GPU of the machine
lane_count=${LANES:-$([ "${gpus[0]}" = cpu ] && echo 1 || echo 2)}
# Seconds on an H200, predicted: 60 for the start, 200 steps of 0.5 s, of 1 s with long completions, of 1.3 s in fp32.
items=${ITEMS-$(for task in letters:bfloat16:160 sums:bfloat16:160 steps:bfloat16:270 sums:float32:330; do
    for mode in off history; do echo "${task%:*}:$mode:${task##*:}"; done
done) sums:float32:again:330 sums:bfloat16:again:160 letters:bfloat16:again:160 steps:bfloat16:again:270}
times=${TIMES-8b:64:330 8b:128:380}
queue=$work/queue
drafts=("${PYTHON:-python3}" -m benchmarks.drafts)

# The queue has lines of FILE SECONDS ARGUMENT... Print SECONDS ARGUMENT... of the first that was not measured and can
# end in time, and remove it.
next() {
    local file seconds rest
    exec 9> "$queue.lock"
    flock 9
    while read -r file seconds rest; do
        if ! grep -qsE '"exit_code": 0|"history": \[\{' "$out/$file" && [ $((SECONDS + seconds)) -lt "$end" ]; then
            sed -i "/^$file /d" "$queue"
            echo "$seconds $rest"
            return
        fi
    done < "$queue"
}

# lane GPU OPTION...: work through the queue on one GPU, with its share of the cores
lane() {
    local first=0 seconds limit line arguments status
    [ "$1" = cpu ] || export CUDA_VISIBLE_DEVICES=$1 first=$(($1 * cores))
    shift
    while read -r seconds line < <(next); do
        read -ra arguments <<< "$line"
        limit=$((end - SECONDS - 60)) status=0 # 60: to end, and to write what was measured
        [ "$limit" -lt $((seconds * 3 / 2)) ] || limit=$((seconds * 3 / 2)) # one that hangs
        [ "${arguments[0]}" != run ] || arguments+=(--limit "$limit")
        taskset -c "$first-$((first + cores - 1))" timeout -k 30 $((limit + 60)) "${drafts[@]}" "${arguments[@]}" \
            --work "$work" --out "$out" "$@" || status=$?
        echo "drafts_chain: ${arguments[*]}: exit code $status, $((end - SECONDS)) s left"
    done
}

# lanes COUNT OPTION...: this many lanes on each GPU, until the queue is empty
lanes() {
    local count=$1 gpu
    shift
    for _ in $(seq "$count"); do
        for gpu in "${gpus[@]}"; do
            lane "$gpu" "$@" &
        done
    done
    wait
}

reserve=${RESERVE:-$([ -n "$times" ] && echo 400 || echo 0)}
end=$((end - reserve))
for item in $items; do
    IFS=: read -r task dtype mode seconds <<< "$item"
    echo "drafts-$task-$dtype-$mode.json $seconds run --task $task --dtype $dtype --mode $mode --model $model"
done > "$queue"
lanes "$lane_count" "$@"
end=$((end + reserve))
for item in $times; do
    IFS=: read -r shape requests seconds <<< "$item"
    echo "drafts-$shape-$requests.json $seconds generate --shape $shape --requests $requests"
done > "$queue"
# shellcheck disable=SC2086 # a list of options
lanes 1 ${TIMED:-}
