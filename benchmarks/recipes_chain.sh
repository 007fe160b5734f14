#!/usr/bin/env bash
# Run the recipes of benchmarks/recipes.py, one on each GPU, and then those that need two. What was measured is left
# out, and no recipe starts that is unlikely to end in time, so that several short rentals share the work.
#   benchmarks/recipes_chain.sh MODEL WORK OUT SECONDS [FLAG...]
# MODEL: folder of SmolLM2; WORK: data and logs; OUT: results, and those of earlier rentals; FLAG: of the trainer, that
# overrides those of all recipes.
#   GPUS="0 1"    GPUs (default: all), or cpu for a dry run
#   ITEMS="..."   RECIPE:SECONDS, try-TASK:SECONDS or wait-VARIANT:SECONDS, SECONDS with start and served weights
#                 (default: all but the last, in the order of their worth)
#   OLD=FOLDER    the older package of variants in lockstep
#   PAIRS="..."   the same for recipes that need two GPUs, which begin when the ITEMS have ended
#   RESERVE=N     seconds to keep for PAIRS
set -euo pipefail
model=$1 work=$(mkdir -p "$2" && cd "$2" && pwd) out=$(mkdir -p "$3" && cd "$3" && pwd) end=$((SECONDS + $4))
shift 4
flags=("$@")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
read -ra gpus <<< "${GPUS:-$(nvidia-smi --query-gpu=index --format=csv,noheader | xargs)}"
cores=$(($(nproc) / $([ "${gpus[0]}" = cpu ] && echo 1 || nvidia-smi -L | wc -l))) # of each GPU of the machine
queue=$work/queue
recipes=("${PYTHON:-python3}" -m benchmarks.recipes)

is_measured() {
    case $1 in
    wait-*) grep -qs '"exit_code": 0' "$out/recipe-$1.json" ;;
    *) grep -qs '"served": {' "$out/recipe-$1.json" ;;
    esac
}

# The queue has lines of RECIPE SECONDS. Print the first that was not measured and can end in time, and remove it.
next() {
    local recipe seconds
    exec 9> "$queue.lock"
    flock 9
    while read -r recipe seconds; do
        if [ -n "$recipe" ] && ! is_measured "$recipe" && [ $((SECONDS + seconds)) -lt "$end" ]; then
            sed -i "/^$recipe /d" "$queue"
            echo "$recipe $seconds"
            return
        fi
    done < "$queue"
}

# lane CORES: work through the queue
lane() {
    local recipe seconds limit status command
    while read -r recipe seconds < <(next); do
        limit=$((end - SECONDS - 50)) status=0 # 50: to serve the weights
        [ "$limit" -lt $((seconds * 3 / 2)) ] || limit=$((seconds * 3 / 2)) # one that hangs
        case $recipe in
        try-*) command=(try --task "${recipe#try-}") ;;
        wait-*lockstep) command=(wait --variant "${recipe#wait-}" --old "$OLD") ;;
        wait-*) command=(wait --variant "${recipe#wait-}") ;;
        *) command=(run --recipe "$recipe") ;;
        esac
        taskset -c "$1" "${recipes[@]}" "${command[@]}" --model "$model" --work "$work" --out "$out" \
            --limit "$limit" ${PROBLEMS:+--problems "$PROBLEMS"} -- "${flags[@]}" || status=$?
        echo "recipes_chain: $recipe: exit code $status, $((end - SECONDS)) s left"
    done
}

# 200 steps of 0.5 to 0.8 s, 60 s for the start, 5 evaluations and 40 s for the served weights.
default="tool:330 full:240 boxed:240 dynamic:330 lora:240 fp8:260 teacher:560"
for task in equations spelling products ransom letters isomorphic syllogism; do default+=" try-$task:240"; done
tr ' :' '\n ' <<< "${ITEMS-$default}" > "$queue"
end=$((end - ${RESERVE:-300}))
for gpu in "${gpus[@]}"; do
    (
        first=0
        [ "$gpu" = cpu ] || export CUDA_VISIBLE_DEVICES=$gpu first=$((gpu * cores))
        lane "$first-$((first + cores - 1))"
    ) &
done
wait
end=$((end + ${RESERVE:-300}))
tr ' :' '\n ' <<< "${PAIRS-servers:260}" > "$queue"
if [ "${#gpus[@]}" -ge 2 ]; then
    export SERVER_GPUS=${gpus[0]} TRAIN_GPUS=${gpus[1]}
elif [ "${gpus[0]}" != cpu ]; then
    exit # one GPU
fi
lane "0-$(($(nproc) - 1))"
