#!/usr/bin/env bash
# Train with every trainer and seed of benchmarks/learn.py, one run at a time on each GPU. Runs that were scored are
# left out, and none starts that is unlikely to end in time, so that several short sessions share the work.
#   benchmarks/learn_chain.sh MODEL WORK OUT SECONDS [FLAG...]
# MODEL: folder of SmolLM2; WORK: data and logs; OUT: results, and those of earlier sessions; FLAG: of `learn run`.
#   GPUS="0 1"    GPUs (default: all), or cpu for a dry run
#   ITEMS="..."   ARM:SEED:SECONDS of each run, SECONDS with start and scoring (default: all twelve, longest first)
set -euo pipefail
model=$1 work=$(mkdir -p "$2" && cd "$2" && pwd) out=$(mkdir -p "$3" && cd "$3" && pwd) end=$((SECONDS + $4))
shift 4
cd "$(dirname "${BASH_SOURCE[0]}")/.."
gpus=${GPUS:-$(nvidia-smi --query-gpu=index --format=csv,noheader | xargs)}
# Seconds of the prototype on an H200, with 40 for two measurements of the accuracy; verl's are a guess.
default=$(for seed in 1 2 3; do echo "stock:$seed:1060 verl:$seed:560 trl:$seed:350 ours:$seed:290"; done)
queue=$work/queue
xargs -n1 <<< "${ITEMS:-$default}" > "$queue"
learn=("${PYTHON:-python3}" -m benchmarks.learn)

[ -e "$work/held_out.jsonl" ] || "${learn[@]}" data --model "$model" --work "$work"

# Print and remove the first item that was not scored yet and can end in time.
next() {
    local arm seed seconds
    exec 9> "$queue.lock"
    flock 9
    while IFS=: read -r arm seed seconds; do
        if ! grep -qs '"after": {' "$out/learn-$arm-$seed.json" && [ $((SECONDS + seconds)) -lt "$end" ]; then
            sed -i "/^$arm:$seed:/d" "$queue"
            echo "$arm $seed"
            return
        fi
    done < "$queue"
}

lane() {
    local arm seed status
    while read -r arm seed < <(next); do
        status=0
        "${learn[@]}" run --arm "$arm" --seed "$seed" --model "$model" --work "$work" --out "$out" \
            --limit $((end - SECONDS)) "$@" || status=$?
        echo "learn_chain: $arm $seed: exit code $status, $((end - SECONDS)) s left"
    done
}

for gpu in $gpus; do
    [ "$gpu" = cpu ] || export CUDA_VISIBLE_DEVICES=$gpu
    lane "$@" &
done
wait
