#!/usr/bin/env bash
# Choose learning rate and group size, train with every trainer and seed of benchmarks/learn.py, several at a time on each
# GPU, and then time each trainer, one at a time on each GPU. What was measured is left out, and nothing starts that is
# unlikely to end in time, so that several short rentals share the work.
#   benchmarks/learn_chain.sh MODEL WORK OUT SECONDS [OPTION...]
# MODEL: folder of SmolLM2; WORK: data and logs; OUT: results, and those of earlier rentals; OPTION: of `learn run` and
# of `learn try`.
#   GPUS="0 1"    GPUs (default: all), or cpu for a dry run
#   LANES=6       runs at a time on each GPU
#   ITEMS="..."   ARM:SEED:SECONDS of each run, SECONDS with start and scoring (default: all twelve, longest first)
#   TIMES="..."   ARM:SEED:SECONDS of each timed run (default: two of each trainer)
set -euo pipefail
model=$1 work=$(mkdir -p "$2" && cd "$2" && pwd) out=$(mkdir -p "$3" && cd "$3" && pwd) end=$((SECONDS + $4))
shift 4
cd "$(dirname "${BASH_SOURCE[0]}")/.."
read -ra gpus <<< "${GPUS:-$(nvidia-smi --query-gpu=index --format=csv,noheader | xargs)}"
cores=$(($(nproc) / $([ "${gpus[0]}" = cpu ] && echo 1 || nvidia-smi -L | wc -l))) # of each GPU of the machine
lane_count=${LANES:-$([ "${gpus[0]}" = cpu ] && echo 1 || echo 6)}
# Seconds on an H200, with start, saving and scoring; verl's are a guess.
items=${ITEMS:-$(for seed in 1 2 3; do echo "stock:$seed:1200 verl:$seed:900 trl:$seed:600 ours:$seed:450"; done)}
times=${TIMES:-$(for seed in 1 2; do echo "ours:$seed:90 trl:$seed:120 verl:$seed:170 stock:$seed:260"; done)}
queue=$work/queue
learn=("${PYTHON:-python3}" -m benchmarks.learn)

[ -e "$work/choice/held_out.jsonl" ] || "${learn[@]}" data --model "$model" --work "$work"

is_measured() { # FILE
    case $1 in
        */learning-time-*) grep -qs '"exit_code": 0' "$1" ;;
        *) grep -qs '"held_out": \[{' "$1" ;;
    esac
}

# The queue has lines of FILE SECONDS ARGUMENT... Print SECONDS ARGUMENT... of the first that was not measured and can
# end in time, and remove it.
next() {
    local file seconds rest
    exec 9> "$queue.lock"
    flock 9
    while read -r file seconds rest; do
        if ! is_measured "$out/$file" && [ $((SECONDS + seconds)) -lt "$end" ]; then
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
        limit=$((end - SECONDS - 40)) status=0 # 40: to measure the accuracy
        [ "$limit" -lt $((seconds * 3 / 2)) ] || limit=$((seconds * 3 / 2)) # one that hangs
        taskset -c "$first-$((first + cores - 1))" "${learn[@]}" "${arguments[@]}" --model "$model" --work "$work" \
            --out "$out" --limit "$limit" "$@" || status=$?
        echo "learn_chain: ${arguments[*]}: exit code $status, $((end - SECONDS)) s left"
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

# enqueue COMMAND PREFIX ITEM...
enqueue() {
    local command=$1 prefix=$2 item arm seed seconds
    shift 2
    for item in "$@"; do
        IFS=: read -r arm seed seconds <<< "$item"
        echo "$prefix-$arm-$seed.json $seconds $command --arm $arm --seed $seed"
    done > "$queue"
}

if [ ! -e "$out/learning-choice.json" ]; then
    for rate in 5e-06 1e-05 2e-05; do
        for size in 8 16; do
            echo "learning-try-$rate-$size.json 300 try --learning-rate $rate --generations $size"
        done
    done > "$queue"
    lanes "$lane_count" "$@"
    "${learn[@]}" choose --out "$out" || [ -e "$out/learning-choice.json" ]
fi
# shellcheck disable=SC2086 # lists of items
enqueue run learn $items
lanes "$lane_count" "$@"
# shellcheck disable=SC2086
enqueue time learning-time $times
lanes 1 "$@"
