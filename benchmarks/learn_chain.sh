#!/usr/bin/env bash
# Choose learning rate and group size, then train with every trainer and seed of benchmarks/learn.py, one run at a time
# on each GPU. What was measured is left out, and no run starts that is unlikely to end in time, so that several short
# sessions share the work.
#   benchmarks/learn_chain.sh MODEL WORK OUT SECONDS [OPTION...]
# MODEL: folder of SmolLM2; WORK: data and logs; OUT: results, and those of earlier sessions; OPTION: of `learn run` and
# of `learn try`.
#   GPUS="0 1"    GPUs (default: all), or cpu for a dry run
#   ITEMS="..."   ARM:SEED:SECONDS of each run, SECONDS with start and scoring (default: all twelve, longest first)
set -euo pipefail
model=$1 work=$(mkdir -p "$2" && cd "$2" && pwd) out=$(mkdir -p "$3" && cd "$3" && pwd) end=$((SECONDS + $4))
shift 4
cd "$(dirname "${BASH_SOURCE[0]}")/.."
read -ra gpus <<< "${GPUS:-$(nvidia-smi --query-gpu=index --format=csv,noheader | xargs)}"
cores=$(($(nproc) / ${#gpus[@]}))
# Seconds of the prototype on an H200, with 60 for saving and scoring; verl's are a guess.
items=${ITEMS:-$(for seed in 1 2 3; do echo "stock:$seed:1080 verl:$seed:700 trl:$seed:370 ours:$seed:310"; done)}
queue=$work/queue
learn=("${PYTHON:-python3}" -m benchmarks.learn)

[ -e "$work/choice/held_out.jsonl" ] || "${learn[@]}" data --model "$model" --work "$work"

# The queue has lines of FILE SECONDS ARGUMENT... Print SECONDS ARGUMENT... of the first that was not measured and can
# end in time, and remove it.
next() {
    local file seconds rest
    exec 9> "$queue.lock"
    flock 9
    while read -r file seconds rest; do
        if ! grep -qs '"held_out": \[{' "$out/$file" && [ $((SECONDS + seconds)) -lt "$end" ]; then
            sed -i "/^$file /d" "$queue"
            echo "$seconds $rest"
            return
        fi
    done < "$queue"
}

# lane PLACE OPTION...: work through the queue on one GPU, with its share of the cores
lane() {
    local first=$(($1 * cores)) seconds limit line arguments status
    [ "${gpus[$1]}" = cpu ] || export CUDA_VISIBLE_DEVICES=${gpus[$1]}
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
    local count=$1 place
    shift
    for _ in $(seq "$count"); do
        for place in "${!gpus[@]}"; do
            lane "$place" "$@" &
        done
    done
    wait
}

if [ ! -e "$out/learning-choice.json" ]; then
    for rate in 5e-06 1e-05 2e-05; do
        for size in 8 16; do
            echo "learning-try-$rate-$size.json 300 try --learning-rate $rate --generations $size"
        done
    done > "$queue"
    lanes "$([ "${gpus[0]}" = cpu ] && echo 1 || echo 3)" "$@"
    "${learn[@]}" choose --out "$out" || [ -e "$out/learning-choice.json" ]
fi
for item in $items; do
    IFS=: read -r arm seed seconds <<< "$item"
    echo "learn-$arm-$seed.json $seconds run --arm $arm --seed $seed"
done > "$queue"
lanes 1 "$@"
