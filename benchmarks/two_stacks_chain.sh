#!/usr/bin/env bash
# Run groups of bench_h200.sh with two stacks (torch, vLLM, Transformer Engine) on one machine, in turns: the first, the
# second, the second, the first. What was measured is left out, and nothing starts that is unlikely to end in time.
#   benchmarks/two_stacks_chain.sh WORK OUT SECONDS NAME=PYTHONPATH NAME=PYTHONPATH
# WORK: models and logs; OUT: results, OUT/NAME-TURN/GROUP.json; NAME: of the stack, as in vllm-0.32; PYTHONPATH: its
# folders.
#   ITEMS="GPU:GROUP:SECONDS ..."   SECONDS of one run with one stack. The items of a GPU run one after the other.
#                                   GPU is cpu for a dry run (with DRY=1).
# Afterwards run: python -m benchmarks.two_stacks report
set -euo pipefail
work=$(mkdir -p "$1" && cd "$1" && pwd) out=$(mkdir -p "$2" && cd "$2" && pwd) end=$((SECONDS + $3))
stacks=("$4" "$5")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
items=${ITEMS:-0:step-best:150 0:step-sleep:160 1:step-lora-8b:190}
cores=$(($(nproc) / $([[ $items == cpu:* ]] && echo 1 || nvidia-smi -L | wc -l)))

# lane GPU: all items of this GPU, on its share of the cores
lane() {
    local first=0 item gpu group seconds turn stack left folder
    [ "$1" = cpu ] || export CUDA_VISIBLE_DEVICES=$1 first=$(($1 * cores))
    for item in $items; do
        IFS=: read -r gpu group seconds <<< "$item"
        [ "$gpu" = "$1" ] || continue
        for turn in 0:1 1:1 1:2 0:2; do
            stack=${stacks[${turn%:*}]} left=$((end - SECONDS)) folder=$out/${stacks[${turn%:*}]%%=*}-${turn#*:}
            if compgen -G "$folder/$group*.json" > /dev/null || [ "$left" -lt "$seconds" ]; then continue; fi
            [ "$left" -lt $((seconds * 3 / 2)) ] || left=$((seconds * 3 / 2)) # one that hangs
            mkdir -p "$folder"
            PYTHONPATH=${stack#*=} OUT=$folder WORK=$work/gpu$1 ONLY=ours ROUNDS=1 DEADLINE=$left \
                timeout -s INT -k 20 "$left" taskset -c "$first-$((first + cores - 1))" benchmarks/bench_h200.sh "$group" \
                > "$work/$group-$(basename "$folder").txt" 2>&1 || echo "two_stacks_chain: $folder $group failed"
            echo "two_stacks_chain: $folder $group: $((end - SECONDS)) s left"
        done
    done
}

for gpu in $(tr ' ' '\n' <<< "$items" | cut -d: -f1 | sort -u); do
    lane "$gpu" &
done
wait
