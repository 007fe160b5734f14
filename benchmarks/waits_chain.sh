#!/usr/bin/env bash
# Measure the cases of benchmarks/bench_waits.py: those of one GPU on each, the learning curves, those of two GPUs, and
# what is left. What was measured is left out, and nothing starts that is unlikely to end in time, so that several
# short rentals share the work.
#   benchmarks/waits_chain.sh MODEL OLD WORK OUT SECONDS [OPTION...]
# MODEL: folder of SmolLM2; OLD: the package before conversations ran by themselves (bench_waits.py has the command);
# WORK: data and logs; OUT: results, and those of earlier rentals; OPTION: of `bench_waits run` and `learn`, as --dry.
#   GPUS="0 1"    GPUs (default: all), or cpu for a dry run
#   LANES=2       cases at a time on each GPU, of which one trains while others import their packages
#   ITEMS="..."   CASE:ROUNDS:SECONDS on one GPU, or peers-8b:1:SECONDS for ms-swift and TRL
#   CURVES="..."  REMEDY:SEED:SECONDS, all at once when the ITEMS have ended
#   PAIRS="..."   like ITEMS, for cases of two GPUs, which begin when the CURVES have ended
#   LATER="..."   like ITEMS, of one GPU, when the PAIRS have ended
#   RESERVE=N     seconds that ITEMS leave to what follows; they are ended then, and keep what they have measured
# Rentals of 1,500 s with two GPUs: the first one with the defaults, the second one with
#   ITEMS="spare-8b:1:570 steps-8b:1:600 turns-8b:1:600 peers-8b:1:700" CURVES= PAIRS=flight-8b:1:500 RESERVE=520
#   LATER="steps-smollm2:1:150 spare-smollm2:1:180"
set -euo pipefail
model=$1 old=$2 work=$(mkdir -p "$3" && cd "$3" && pwd) out=$(mkdir -p "$4" && cd "$4" && pwd) end=$((SECONDS + $5))
shift 5
options=("$@")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
read -ra gpus <<< "${GPUS:-$(nvidia-smi --query-gpu=index --format=csv,noheader | xargs)}"
lane_count=${LANES:-$([ "${gpus[0]}" = cpu ] && echo 1 || echo 2)}
on_machine=$([ "${gpus[0]}" = cpu ] && echo 1 || nvidia-smi -L | wc -l)
cores=$(($(nproc) / (on_machine * lane_count)))
[ "$cores" -ge 1 ] || cores=1
queue=$work/queue
waits=("${PYTHON:-python3}" -m benchmarks.bench_waits)
common=(--model "$model" --work "$work" --out "$out")

# The queue has lines of CASE ROUNDS SECONDS. Print the first that can end in time, and remove it; `run` itself leaves
# out what was measured.
next() {
    local case rounds seconds
    exec 9> "$queue.lock"
    flock 9
    while read -r case rounds seconds; do
        if [ -n "$case" ] && [ $((SECONDS + seconds)) -lt "$end" ]; then
            sed -i "/^$case $rounds /d" "$queue"
            echo "$case $rounds $seconds"
            return
        fi
    done < "$queue"
}

# run_item CASE ROUNDS: a run that hangs is ended after 600 s
run_item() {
    local left=$((end - SECONDS))
    if [ "$1" = peers-8b ]; then # one step on each rollout, of the lengths of the other cases
        grep -qs '"arm": "trl"' "$(dirname "$out")/step-lora-8b-tails.json" && return
        "${PYTHON:-python3}" -m benchmarks.bench step --json "$(dirname "$out")/step-lora-8b-tails.json" --shape 8b \
            --lengths lognormal:700:0.9:4096 --prompts constant:256 --completions 64 --ours tokens16384+shared \
            --stock mbs4 --trl mbs2 --rounds 1 --steps 3 --timeout 400 --deadline "$left" --work "$work/bench" \
            --trl-flags "--sleep_level 2" --flags "--vllm_gpu_memory_utilization 0.3 --sleep_level 0 \
--tuner_type lora --lora_rank 16 --lora_alpha 32 --target_modules all-linear"
    else
        timeout -k 60 "$left" "${waits[@]}" run --case "$1" --rounds "$2" --old "$old" "${common[@]}" \
            --limit $((left < 600 ? left : 600)) "${options[@]}"
    fi
}

# lane CORES: work through the queue
lane() {
    local case rounds seconds status
    while read -r case rounds seconds < <(next); do
        status=0
        run_item "$case" "$rounds" > "$work/$case.log" 2>&1 || status=$?
        echo "waits_chain: $case: exit code $status, $((end - SECONDS)) s left"
    done
}

# lanes ITEM...: work through these on all GPUs
lanes() {
    local gpu number first
    [ $# -gt 0 ] || return 0
    printf '%s\n' "$@" | tr : ' ' > "$queue"
    for number in $(seq 0 $((lane_count - 1))); do
        for gpu in "${gpus[@]}"; do
            first=$((number * cores))
            [ "$gpu" = cpu ] || first=$(((gpu * lane_count + number) * cores))
            (
                [ "$gpu" = cpu ] || export CUDA_VISIBLE_DEVICES=$gpu
                taskset -cp "$first-$((first + cores - 1))" "$BASHPID" > /dev/null
                lane
            ) &
        done
    done
    wait
}

# curve REMEDY SEED SECONDS PLACE: a server is on the other GPU
curve() {
    local status=0 left=$((end - SECONDS)) here=${gpus[$(($4 % ${#gpus[@]}))]} other=${gpus[$((($4 + 1) % ${#gpus[@]}))]}
    grep -qs '"held_out": \[{' "$out/waits-learn-$1-$2.json" && return
    [ "$left" -gt "$3" ] || return 0
    [ "$here" = cpu ] || export CUDA_VISIBLE_DEVICES=$here
    [ "$1" != flight ] || [ "$here" = cpu ] || export CUDA_VISIBLE_DEVICES=$here,$other
    timeout -k 60 "$left" "${waits[@]}" learn --remedy "$1" --seed "$2" "${common[@]}" --limit $((left - 40)) \
        "${options[@]}" > "$work/learn-$1-$2.log" 2>&1 || status=$?
    echo "waits_chain: learning with $1, seed $2: exit code $status, $((end - SECONDS)) s left"
}

# Seconds on an H200, predicted: 60 to 75 for each start, of which lanes share a third, and the steps of cases.py.
read -ra items <<< "${ITEMS-spare-smollm2:1:460 turns-smollm2:1:520 steps-smollm2:1:570}"
read -ra curves <<< "${CURVES-flight:1:470 spare:1:470 spare:2:470 flight:2:470}"
read -ra pairs <<< "${PAIRS-flight-smollm2:1:300}"
read -ra later <<< "${LATER-spare-smollm2:2:300 turns-smollm2:2:300 steps-smollm2:2:300}"
reserve=${RESERVE:-800}
end=$((end - reserve))
lanes "${items[@]}"
end=$((end + reserve))
if [ "${#gpus[@]}" -ge 2 ] || [ "${gpus[0]}" = cpu ]; then
    for place in "${!curves[@]}"; do
        IFS=: read -r remedy seed seconds <<< "${curves[place]}"
        curve "$remedy" "$seed" "$seconds" "$place" &
    done
    wait
    printf '%s\n' "${pairs[@]}" | tr : ' ' > "$queue"
    ([ "${gpus[0]}" = cpu ] || export CUDA_VISIBLE_DEVICES=${gpus[0]},${gpus[1]} && lane)
fi
lanes "${later[@]}"
