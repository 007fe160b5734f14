#!/usr/bin/env bash
# Run the measurements on H200, and some of them on H100. Each group takes less than ten minutes; settings that end
# at its limit have the steps that they have made.
#   benchmarks/bench_h200.sh GROUP...
#       groups on 1 GPU: fixed fixed-4b long-0.6b long-1.7b long-4b memory memory-0.6b memory-1.7b step-equal step-best
#                        step-sleep
#                        held-out held-out-trl step-lora-8b step-lora-8b-fp8 step-lora-8b-verl step-adapter-8b
#                        step-lora-30b step-lora-30b-fp8 step-lora-30b-compiled step-lora-30b-compiled-fp8
#                        step-lora-omni-audio step-lora-omni colocated-sync-8b colocated-sync-8b-fp8
#                        step-verl (this and step-lora-8b-verl with verl 0.9.1, Ray and what else verl requires)
#                        qwen3.5 qwen3.5-lora qwen3.5-step qwen3.5-step-lora
#                        vl-qwen2.5 vl-qwen2.5-lora vl-qwen3 vl-qwen3-lora lora-8b lora-14b moe moe-even moe-step
#                        moe-30b-lora moe-30b-lora-even
#                        share-1.7b share-8b-lora, and one cell of the last two, as in share-1.7b-2048-8
#                        dp1-8b-lora server-1.7b server-8b generation-8b generation-30b generation-30b-64
#                        generation-long generation-attention-1.7b generation-attention-8b draft-rows draft-rows-v1
#                        gpu-tests-NAME[,NAME...] (tests/gpu/test_NAME.py, by benchmarks/gpu_tests.py)
#       groups on 2 GPUs: two pp2-stages qwen3.5-server two-colocated two-colocated-8b two-server two-server-8b sync
#                         sync-30b moe-server dp2-8b-lora tp2-8b-lora pp2-8b-lora moe-30b-lora-ep2
#                         moe-30b-lora-even-ep2 moe-35b-lora-ep2 step-lora-30b-ep2 step-lora-30b-ep2-fp8
#       groups on 4 GPUs: four dp4-8b-lora tp4-8b-lora pp4-8b-lora pp4-8b-lora-last-6 four-colocated-8b four-server-8b
#                         moe-30b-lora-ep4 moe-30b-lora-even-ep4 moe-30b-full-ep4 step-full-30b-ep4 moe-35b-lora-ep4
#                         moe-30b-server-ep2
#       group on 2 GPUs and more: dispatch
#   CARD=h100           sizes that fit into 80 GB, for the groups step-best held-out* step-lora-8b* step-adapter-8b two-*
#                       four-* sync *-8b-lora lora-14b step-lora-30b-ep2* and moe-*b-lora-ep*; names get the suffix
#                       -h100
#   OUT=folder          folder for the JSON files (default: benchmarks/$CARD)
#   ROUNDS=2            rounds of each run
#   DEADLINE=570        seconds for each group
#   WORK=folder         folder for models, logs and outputs (default: runs/bench)
#   ONLY=ours           measure one trainer alone
#   EAGER=1             decode without CUDA graphs
#   DRY=1               run the same commands on a CPU, with a tiny model and few tokens
# Afterwards run: python -m benchmarks.bench report
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
card=${CARD:-h200}
out=${OUT:-benchmarks/$card}
python=$(command -v python || command -v python3)
began=$SECONDS

# bench KIND NAME SHAPE ARGUMENT...      later arguments override earlier ones
bench() {
    local kind=$1 name=$2$suffix shape=$3 left=$((${DEADLINE:-570} - SECONDS + began)) dry_flags=() light
    shift 3
    [ "$kind" = step ] || set -- --random-weights "$@"
    if [ "$left" -lt 60 ]; then
        echo "== $name: no time left" >&2
        return
    fi
    if [ -n "${DRY:-}" ]; then
        shape=$(small "$shape")
        local dtype=float32
        [[ $name != *fp8* ]] || dtype=bfloat16 # which alone is quantized
        dry_flags=(--dtype $dtype --rounds 1 --steps 2 --warm-up 1 --lengths constant:16 --prompts constant:48)
        light="--vllm_enforce_eager true --sleep_level 0 --vllm_gpu_memory_utilization 0.3"
        [ "$kind" = train ] || dry_flags+=(--ours-flags "$light" --stock-flags "$light" --trl-flags "$light" --verl-flags "$light")
    fi
    echo "== $name"
    "$python" -m benchmarks.bench "$kind" --json "$out/$name.json" --shape "$shape" --rounds "${ROUNDS:-2}" --steps 4 \
        --ahead --timeout 300 --deadline "$left" --work "${WORK:-runs/bench}" "$@" "${dry_flags[@]}" \
        ${ONLY:+--only "$ONLY"} || echo "== $name failed" >&2
}

# One rule for all sizes: the largest micro batch that fits, beside a vLLM with room for all completions of a step.
suffix="" vllm_1b="--vllm_gpu_memory_utilization 0.4" vllm_8b="--vllm_gpu_memory_utilization 0.3"
tokens_1b=16384 tokens_8b=16384 tokens_8b_alone=16384 tokens_14b=16384 tokens_layout=16384 tokens_ep2=12288 tokens_ep4=16384
tokens_35b_ep2=8192 tokens_35b_ep4=12288 tokens_30b_ep2=12288
stock_1b=mbs16
trl_1b=(mbs16+awake mbs32+awake) trl_8b=(mbs8+awake mbs8+awake+liger) verl_8b=(mbs16+bf16+bypass mbs16+bf16+bypass+merged)
case $card in
    h200) ;;
    h100)
        suffix=-h100 vllm_1b="--vllm_gpu_memory_utilization 0.22" vllm_8b="--vllm_gpu_memory_utilization 0.33"
        tokens_1b=12288 tokens_8b=6144 tokens_8b_alone=10240 tokens_14b=6144 tokens_layout=8192 tokens_ep2=6144 tokens_ep4=8192
        tokens_35b_ep2=2048 tokens_35b_ep4=6144 tokens_30b_ep2=4096
        stock_1b=mbs8
        trl_1b=(mbs8+awake mbs16+awake) trl_8b=(mbs4+awake mbs8) verl_8b=(mbs8+bf16+bypass mbs8+bf16+bypass+merged) ;;
    *)
        echo "bench_h200: CARD=$card is unknown; use h200 or h100" >&2
        exit 2 ;;
esac

fixed=(--lengths constant:512 --prompts constant:48)
long=(--lengths lognormal:700:0.9:4096 --prompts constant:256)
[ -n "${DRY:-}" ] || long+=(--memory-cap-gb 100)
colocated=(--vllm_gpu_memory_utilization 0.4 --offload_model true --offload_optimizer true)

lora=(--tuner_type lora --lora_rank 16 --lora_alpha 32 --target_modules all-linear)
fp8=(--rollout_quantization fp8 --rollout_importance_sampling_mode token_truncate)
bf16_moments=(--use_precision_aware_optimizer true --exp_avg_dtype bf16 --exp_avg_sq_dtype bf16)
moe=(--moe_grouped_gemm true --moe_permute_fusion true)
# Routers with random weights send most tokens to a few experts (random_routers.py), those of trained models do not.
even="--megatron_extra_kwargs '{\"moe_router_force_load_balancing\":true}'"
uneven=(--lengths lognormal:400:0.9:2048 --prompts constant:128 --completions 64)
# vLLM does not start if less memory than its share is free, although $cache decides.
eager="--vllm_enforce_eager true --vllm_gpu_memory_utilization 0.1 --vllm_engine_kwargs"
# CUDA graphs of decoding alone, without torch.compile, which would take a minute of each start of both trainers.
# FlashInfer, whose prefill of delta nets vLLM prefers on Hopper, compiles it for five minutes on 32 cores.
decoding='"compilation_config":{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_sizes":[8,16,64,128]}'
decoding+=',"gdn_prefill_backend":"triton"'
compiled='"compilation_config":{"cudagraph_capture_sizes":[8,16,64,128]},"gdn_prefill_backend":"triton"'
graphs="--vllm_gpu_memory_utilization 0.3 --vllm_engine_kwargs"
if [ -n "${EAGER:-}" ]; then decoding='"gdn_prefill_backend":"triton"' graphs="--vllm_enforce_eager true $graphs"; fi
dummy='"load_format":"dummy"' # the first weight sync brings the weights
# Servers that start side by side on a GPU must not size their caches by the memory that is free.
cache_bytes=8000000000
[ -z "${DRY:-}" ] || cache_bytes=67108864
cache="\"kv_cache_memory_bytes\":$cache_bytes"

# qwen3_5 KIND NAME FLAGS ARGUMENT...      delta nets tune their kernels in the first steps
# Gradients of cuDNN's attention are wrong with 256 channels per head. These machines lack flash-attn: both trainers
# attend with torch's kernel, which is the same.
qwen3_5() {
    local kind=$1 name=$2 flags=$3
    shift 3
    bench "$kind" "$name" 2b-qwen3.5 "${fixed[@]}" --steps 5 --warm-up 2 --timeout 420 \
        --flags "$flags --attention_backend flash --vit_attn_impl sdpa" "$@"
}

# with_servers SHAPE "TRAINER..." FLAGS COMMAND...      runs the command while the rollout server of each trainer (on: this
# package's, off: ms-swift's) is on the last $server_gpus GPUs (1); the command finds their URLs in $servers
with_servers() {
    local pids=() urls=()
    start_servers "$1" "$2" "$3"
    servers=("${urls[0]}" "${urls[-1]}")
    while_servers_run "${@:4}"
    stop_servers
}

# while_servers_run COMMAND...      Trainers start beside the servers and wait for them, also for one that has ended:
# then the command's benchmark is ended.
while_servers_run() {
    local end_benchmarks='import psutil, sys
for process in psutil.Process(int(sys.argv[1])).children():
    if "benchmarks.bench" in process.cmdline():
        process.terminate()'
    {
        while sleep 1; do
            for pid in "${pids[@]}"; do kill -0 "$pid" 2>/dev/null || break 2; done
        done
        echo "== a server has ended" >&2
        "$python" -c "$end_benchmarks" $$
    } &
    local watch=$!
    "$@"
    kill $watch 2>/dev/null || true
}

# start_servers SHAPE "TRAINER..." FLAGS      appends to $pids and $urls
start_servers() {
    local shape=$1 arms=($2) flags=($3) work=${WORK:-runs/bench} dtype=bfloat16
    local model type template arm program gpus port=$((8100 + RANDOM % 100 * 100)) # other groups may run beside
    if [ -n "${DRY:-}" ]; then
        shape=$(small "$shape") arms=(on) dtype=float32 # ms-swift's server needs a GPU
        flags+=(--vllm_enforce_eager true --vllm_gpu_memory_utilization 0.3)
    fi
    read -r model type template < <("$python" -c 'import sys; from pathlib import Path
from benchmarks.harness.checkpoints import made_checkpoint
from benchmarks.harness.shapes import SHAPES
shape = SHAPES[sys.argv[2]]
folder = made_checkpoint(Path(sys.argv[1]), sys.argv[2], with_weights=False).resolve()
print(folder, shape.model_type, shape.template)' "$work" "$shape" | tail -1)
    gpus=$("$python" -c 'import sys, torch
print(*range(torch.cuda.device_count())[-int(sys.argv[1]) :], sep=",")' "${server_gpus:-1}")
    for arm in "${arms[@]}"; do
        program=swift.cli.rollout
        [ "$arm" = on ] || program=benchmarks.harness.stock_server
        PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} SWIFT_MEGATRON_GRPO=$arm CUDA_VISIBLE_DEVICES=$gpus \
            "$python" -P -m $program --port $port \
            --model "$model" --model_type "$type" --template "$template" --vllm_max_model_len 1024 \
            --torch_dtype "$dtype" --vllm_engine_kwargs '{"load_format": "dummy"}' "${flags[@]}" \
            >"$work/rollout-$shape-$arm-$port.log" 2>&1 &
        pids+=($!) urls+=("http://127.0.0.1:$port") port=$((port + 50))
    done
}

stop_servers() {
    kill "${pids[@]}" || true
    wait "${pids[@]}" || true
}

# small SHAPE      the shape of the same family that a CPU runs
small() {
    case $1 in *-*) echo "toy-${1#*-}" ;; *) echo toy ;; esac
}

# images NAME SHAPE FLAGS SETTING...      an image of 768 x 768 pixels in each prompt; settings of ms-swift's trainer
images() {
    bench step "$1" "$2" --lengths constant:256 --prompts constant:48 --completions 64 --rounds 1 --steps 3 \
        --ours tokens16384 --stock "${@:4}" --flags "$graphs '{$decoding}' --sleep_level 1 $3" \
        --goal "1.8 for the train phase"
}

# sync NAME SHAPE SERVER FLAGS GOAL      short completions: only the sync counts
sync() {
    bench step "$1" "$2" --random-weights --lengths constant:64 --prompts constant:48 --completions 16 --rounds 1 \
        --steps 6 --warm-up 2 --timeout 420 --ours tokens16384 --servers "$3" "$3" --flags "$4" --goal "weight sync $5"
}

# sync_8b_and_4b URL URL      Gradients and optimizer state of 4B do not fit into 80 GB, so 4B has adapters there.
sync_8b_and_4b() {
    sync sync-8b-lora 8b "$1" "${lora[*]}" "100 ms"
    case $card in
        h200) sync sync-4b 4b "$2" "" "50 ms" ;;
        h100) sync sync-4b-lora 4b "$2" "${lora[*]}" "50 ms" ;;
    esac
}

# step_30b NAME SETTING COMPLETIONS FLAGS      the whole step of adapters of Qwen3-30B-A3B
step_30b() {
    bench step "$1" 30b-qwen3-moe --random-weights "${fixed[@]}" --completions "$3" --ours "$2" --rounds 1 --steps 3 \
        --timeout 420 --flags "$graphs '{$dummy,$cache,$decoding}' --sleep_level 2 ${moe[*]} ${lora[*]} $4"
}

# step_30b_ep2 NAME FLAGS      the same on two GPUs: the trainer has half of the experts on each, vLLM half of each expert
step_30b_ep2() {
    step_30b "$1" "dp2+ep2+tokens$tokens_30b_ep2" 128 \
        "--vllm_tensor_parallel_size 2 --offload_model true --offload_optimizer true --offload_grad true $2"
}

# step_omni NAME SHAPE ARGUMENT...      the whole step of adapters of Qwen3-Omni; ms-swift's trainer has no flash attention
# without flash-attn
step_omni() {
    bench step "$1" "$2" --random-weights --lengths constant:256 --prompts constant:48 --completions 64 --rounds 1 \
        --ours tokens8192 --ours-flags "--attention_backend flash" --timeout 600 "${@:3}" \
        --flags "$graphs '{$dummy,$cache,$decoding}' --sleep_level 2 --offload_model true ${moe[*]} ${lora[*]}"
}

# step_full_30b_ep4      the whole step of all weights of 30B-A3B on four GPUs, with the settings of templates/moe_full.sh
step_full_30b_ep4() {
    bench step step-full-30b-ep4 30b-qwen3-moe --random-weights "${fixed[@]}" --completions 128 \
        --ours dp4+ep4+tokens6144 --rounds 1 --steps 3 --timeout 420 \
        --flags "$graphs '{$dummy,$cache,$decoding}' --sleep_level 2 ${moe[*]} ${bf16_moments[*]} \
--vllm_tensor_parallel_size 2 --offload_model true --offload_optimizer true --offload_grad true"
}

# held_out NAME ARGUMENT...      long prompts of large groups, and one completion of 20 times the length of the others
held_out() {
    bench step "$1" 1.7b --lengths outlier:200:20 --prompts constant:1000 --generations 16 \
        --ours tokens$tokens_1b+shared "${@:2}" --rounds 1 --steps 4 --flags "$vllm_1b --sleep_level 2"
}

# step_lora_8b NAME FLAGS ARGUMENT...      the whole step of adapters of 8B, beside a vLLM that stays awake
step_lora_8b() {
    bench step "$1" 8b "${fixed[@]}" --completions 64 --ours tokens$tokens_8b+shared --rounds 1 --steps 4 \
        --flags "$vllm_8b --sleep_level 0 ${lora[*]} $2" "${@:3}"
}

# colocated_sync NAME FLAGS
colocated_sync() {
    bench step "$1" 8b --random-weights --lengths constant:64 --prompts constant:48 --completions 16 --rounds 1 \
        --steps 6 --warm-up 2 --ours tokens$tokens_8b --flags "$vllm_8b --sleep_level 0 ${lora[*]} $2"
}

# layout_of_8b NAME SETTING FLAG...      the digit in NAME is the number of GPUs
layout_of_8b() {
    bench train "$1" 8b "${fixed[@]}" --completions $((64 * ${1:2:1})) --ours $2 --rounds 1 --profile \
        --goal "cost per token within 5 %" --flags "${lora[*]} ${*:3}"
}

# part NAME BENCHMARK ARGUMENT...      a benchmark with a file of its own kind
part() {
    local dry_flags=()
    case ${DRY:+$2} in
        bench_server) dry_flags=(--dry) ;;
        bench_generation) dry_flags=(--shape toy --variants default --completions 4 --tokens 16 --prompt-tokens 16
            --dtype float32 --eager --memory 0.3) ;;
        bench_draft_rows) dry_flags=(--shapes toy --arms v1 v1-drafts-2 --running 2 4 --steps 6 --rounds 2
            --prompt-tokens 16 --eager) ;;
    esac
    echo "== $1"
    "$python" -m "benchmarks.$2" --json "$out/parts/$1$suffix.json" --work "${WORK:-runs/bench}/$2" "${@:3}" \
        "${dry_flags[@]}"
}

# several_gpus_8b NAME ARGUMENT...      NAME ends with the completions of a step, 64 for each GPU. The first steps wait for
# rollouts that no training overlapped.
several_gpus_8b() {
    bench step "$1" 8b --random-weights "${fixed[@]}" --completions "${1##*-}" --rounds 1 --steps 7 --warm-up 3 \
        --timeout 420 "${@:2}"
}

# colocated_8b NAME RANKS
colocated_8b() {
    several_gpus_8b "$1" --ours "dp$2+tokens$tokens_8b+shared" --flags "$vllm_8b --sleep_level 0 ${lora[*]}"
}

# behind_server_8b NAME RANKS
behind_server_8b() {
    several_gpus_8b "$1" --ours "dp$2+tokens$tokens_8b_alone+shared" --servers "${servers[@]}" \
        --flags "--async_generate true --rollout_importance_sampling_mode token_truncate ${lora[*]}"
}

# experts_apart NAME SHAPE TOKENS FLAGS      the train phase with the experts of a layer on several GPUs, whose number ends
# NAME; each of them has 64 completions
experts_apart() {
    local ranks=${1##*-ep}
    bench train "$1" "$2" "${uneven[@]}" --completions $((64 * ranks)) --ours "dp$ranks+ep$ranks+tokens$3" --rounds 1 \
        --steps 3 --timeout 420 --flags "${moe[*]} $4" "${@:5}"
}

# adapters_of_35b NAME TOKENS      The first step compiles and tunes kernels for three minutes.
adapters_of_35b() {
    experts_apart "$1" 35b-qwen3.5-moe "$2" "${lora[*]} --attention_backend flash --vit_attn_impl sdpa" --profile
}

# memory SHAPE GOAL
memory() {
    bench train "memory-$1" "$1" --lengths constant:512 --prompts constant:512 --completions 32 --generations 2 \
        --ours tokens16384 tokens16384+elementwise tokens16384+recompute --stock mbs16 mbs16+recompute \
        --pair tokens16384 mbs16 --pair tokens16384+elementwise mbs16 --pair tokens16384+recompute mbs16+recompute --rounds 1 --steps 3 --goal "memory: $2"
}

# share NAME SHAPE FLAGS PROMPT SIZE      groups of SIZE completions of 512 tokens after prompts of PROMPT tokens
share() {
    local stock steps=2 completions=64 goal=""
    # A micro batch of ms-swift's trainer must divide the prompts of a step.
    case $1-$4-$5 in
        1.7b-512-8) stock=(mbs16 mbs8) steps=3 completions=128 ;;
        1.7b-512-16) stock=(mbs8) steps=3 completions=128 ;;
        1.7b-2048-8) stock=(mbs8 mbs4) steps=3 goal="2.2 over repeated prompts" ;;
        1.7b-2048-16) stock=(mbs8) steps=3 completions=128 ;;
        1.7b-8192-8) stock=(mbs2 mbs1) goal="3 over repeated prompts" ;;
        1.7b-8192-16) stock=(mbs2) completions=32 ;;
        8b-lora-512-8) stock=(mbs8) ;;
        8b-lora-512-16) stock=(mbs4) ;;
        8b-lora-2048-8) stock=(mbs4 mbs2) goal="2.2 over repeated prompts" ;;
        8b-lora-2048-16) stock=(mbs2) completions=32 ;;
        8b-lora-8192-8) stock=(mbs1 mbs2) completions=32 goal="3 over repeated prompts" ;;
        8b-lora-8192-16) stock=(mbs1) completions=16 ;;
    esac
    bench train "share-$1-$4-$5" "$2" --lengths constant:512 --prompts "constant:$4" --completions $completions \
        --generations "$5" --ours tokens16384+shared tokens16384 --stock "${stock[@]}" --rounds 1 --steps $steps \
        --flags "$3" --goal "$goal"
}

group() {
    case $1 in
        # Equal flags at micro batch 4, and each at its best setting.
        fixed)
            bench train fixed-1.7b 1.7b "${fixed[@]}" --ours mbs4 tokens16384 tokens32768 --stock mbs4 mbs8 mbs16 \
                --goal "2.5 at equal flags, 1.6 at best" ;;
        # MFU of a larger model, without a memory cap.
        fixed-4b)
            bench train fixed-4b 4b "${fixed[@]}" --ours tokens12288 --stock mbs8 mbs4 --rounds 1 \
                --goal "MFU 50 %" ;;
        # Long-tailed lengths, each at its best setting under 100 GB.
        long-0.6b)
            bench train long-0.6b 0.6b "${long[@]}" --ours tokens32768 --stock mbs8 mbs16 --goal 2.0 ;;
        long-1.7b)
            bench train long-1.7b 1.7b "${long[@]}" --ours tokens16384 --stock mbs4 mbs8 --goal 1.8 ;;
        long-4b)
            bench train long-4b 4b "${long[@]}" --ours tokens5120 \
                --stock mbs4+recompute mbs2+recompute --goal 1.5 --steps 3 ;;
        # 16,384 tokens per micro batch in both trainers: 16 completions of 512 tokens after prompts of 512.
        memory)
            memory 0.6b 0.65
            memory 1.7b 0.75 ;;
        memory-*)
            memory "${1#memory-}" "$([ "$1" = memory-0.6b ] && echo 0.65 || echo 0.75)" ;;
        # The whole step with vLLM and CUDA graphs.
        step-equal)
            bench step step-equal-1.7b 1.7b "${fixed[@]}" --ours mbs4 --stock mbs4 --rounds 1 --steps 6 --goal "1.8" \
                --flags "${colocated[*]} --sleep_level 1" ;;
        # Everything fits beside vLLM, so that it need not sleep.
        step-best)
            bench step step-best-1.7b 1.7b "${fixed[@]}" --ours tokens$tokens_1b+shared --stock $stock_1b \
                --trl "${trl_1b[@]}" --rounds 1 --steps 5 \
                --goal "2.3, over TRL 2.2, over verl 1.5" --flags "$vllm_1b --sleep_level 0" ;;
        step-sleep)
            bench step step-sleep-1.7b 1.7b "${fixed[@]}" --ours tokens$tokens_1b+shared --rounds 1 --steps 5 \
                --flags "$vllm_1b --sleep_level 2" ;;
        # verl also with a vLLM that sleeps, which leaves room for larger micro batches.
        step-verl)
            bench step step-verl-1.7b 1.7b "${fixed[@]}" --ours tokens$tokens_1b+shared \
                --verl mbs16+bypass mbs8+awake+bypass mbs32+bypass mbs16 --rounds 1 --steps 5 \
                --goal "1.5 over verl" --flags "$vllm_1b --sleep_level 2" --ours-flags "--sleep_level 0" ;;
        held-out)
            held_out held-out-1.7b --stock mbs8 mbs4 ;;
        # With an awake vLLM micro batches of 4 do not fit beside TRL's trainer.
        held-out-trl)
            held_out held-out-trl-1.7b --trl mbs4 mbs2+awake ;;
        # 8 prompts allow ms-swift's trainer micro batches of 8 completions at most. TRL with Liger's kernels took 9.0 s
        # where it took 7.8 s without. In 80 GB its vLLM has to sleep for micro batches of 8.
        step-lora-8b)
            step_lora_8b step-lora-8b "" --stock mbs8 --trl "${trl_8b[@]}" --trl-flags "--sleep_level 2" \
                --goal "2.0, over TRL 2.0" ;;
        step-lora-8b-fp8)
            step_lora_8b step-lora-8b-fp8 "${fp8[*]}" --goal 1.08 ;;
        # verl's vLLM sleeps, which leaves room for a larger micro batch. A start and four steps of 23 s, with adapters
        # merged, take longer than 300 s. Without +merged, verl's default, it needs peft 0.20: peft 0.21 finds no adapter in
        # modules of FSDP, and vLLM ends at the first sync.
        step-lora-8b-verl)
            step_lora_8b step-lora-8b-verl "" --verl "${verl_8b[@]}" --verl-flags "--sleep_level 2" --steps 3 \
                --timeout 480 --goal "1.3 over verl" ;;
        # vLLM with the adapter itself, which alone is sent.
        step-adapter-8b)
            step_lora_8b step-adapter-8b "--vllm_enable_lora true" ;;
        # The trainer and vLLM hold 61 GB each in bf16, so that the trainer's weights have to leave the GPU in turns.
        step-lora-30b)
            step_30b step-lora-30b tokens12288 64 "--offload_model true" ;;
        step-lora-30b-fp8)
            step_30b step-lora-30b-fp8 tokens12288 64 "${fp8[*]}" ;;
        # With torch.compile, vLLM's default, which takes a minute of the start.
        step-lora-30b-compiled)
            decoding=$compiled step_30b step-lora-30b-compiled tokens12288 64 "--offload_model true" ;;
        step-lora-30b-compiled-fp8)
            decoding=$compiled step_30b step-lora-30b-compiled-fp8 tokens12288 64 "${fp8[*]}" ;;
        # 8 s of sound in every other row, in turns with ms-swift's trainer; an image of 768 x 768 pixels in each row.
        step-lora-omni-audio)
            step_omni step-lora-omni-audio 30b-qwen3-omni-audio --stock mbs4 ;;
        step-lora-omni)
            step_omni step-lora-omni 30b-qwen3-omni ;;
        step-lora-30b-ep2)
            step_30b_ep2 step-lora-30b-ep2 "" ;;
        step-lora-30b-ep2-fp8)
            step_30b_ep2 step-lora-30b-ep2-fp8 "${fp8[*]}" ;;
        step-full-30b-ep4)
            step_full_30b_ep4 ;;
        # The weight sync of all weights of 8B within a GPU, of which vLLM quantizes all but embeddings and head.
        colocated-sync-8b)
            colocated_sync colocated-sync-8b "" ;;
        colocated-sync-8b-fp8)
            colocated_sync colocated-sync-8b-fp8 "${fp8[*]}" ;;
        # The train phase of adapters. ms-swift's trainer took 10.8 s with micro batches of 4 completions.
        lora-8b)
            bench train lora-8b 8b --lengths lognormal:400:0.9:2048 --prompts constant:128 --completions 64 \
                --ours tokens16384+shared tokens16384 --stock mbs8 --rounds 1 --steps 4 --goal "2.3, MFU 45 %" \
                --profile --flags "${lora[*]}" ;;
        lora-14b)
            bench train lora-14b 14b --lengths lognormal:400:0.9:2048 --prompts constant:128 --completions 64 \
                --ours tokens$tokens_14b --rounds 1 --steps 4 --goal "MFU 45 %" --profile --flags "${lora[*]}" ;;
        two)
            bench train pp2-1.7b 1.7b "${fixed[@]}" --ours pp2+tokens8192 pp2+tokens16384 --stock pp2+mbs8 pp2+mbs16 \
                --goal 1.5 --rounds 1
            bench train tp2-1.7b 1.7b "${fixed[@]}" --ours tp2+sp+tokens16384 tp2+sp+tokens32768 \
                --stock tp2+sp+mbs8 tp2+sp+mbs16 --goal 1.5 --rounds 1 ;;
        # Two stages of 14 layers, and of 17 and 11: the last stage has the output layer, with the work of 5.5 layers.
        pp2-stages)
            bench train pp2-1.7b-even 1.7b "${fixed[@]}" --ours pp2+tokens8192 --rounds 1
            bench train pp2-1.7b-last-11 1.7b "${fixed[@]}" --ours pp2+tokens8192 --rounds 1 \
                --flags "--decoder_last_pipeline_num_layers $([ -n "${DRY:-}" ] && echo 1 || echo 11)" ;;
        four)
            bench train dp4-1.7b 1.7b "${long[@]}" --ours dp4+tokens16384 --stock dp4+mbs4 dp4+mbs2 \
                --goal "1.8, ranks within 3 %" ;;
        # Text rows of a Qwen3.5 with its image part frozen.
        qwen3.5)
            qwen3_5 train qwen3.5-2b "" --ours tokens16384 --stock mbs16 mbs8 --goal 1.8 ;;
        qwen3.5-lora)
            qwen3_5 train qwen3.5-2b-lora "${lora[*]}" --ours tokens16384 --stock mbs16 mbs8 --goal 1.8 ;;
        qwen3.5-step)
            qwen3_5 step qwen3.5-2b-step "$graphs '{$decoding}' --sleep_level 1" --ours tokens16384 --stock mbs16 \
                --rounds 1 --steps 4 --goal "1.8 for the train phase" ;;
        qwen3.5-step-lora)
            qwen3_5 step qwen3.5-2b-step-lora "$graphs '{$decoding}' --sleep_level 1 ${lora[*]}" --ours tokens16384 \
                --stock mbs16 --rounds 1 --steps 4 --goal "1.8 for the train phase" ;;
        qwen3.5-server)
            with_servers 2b-qwen3.5 "on off" "$graphs {$dummy,$cache,$decoding}" group qwen3.5-behind-servers ;;
        qwen3.5-behind-servers)
            qwen3_5 step qwen3.5-2b-server "" --random-weights --lengths constant:256 --ours tokens16384 --stock mbs16 \
                --rounds 1 --steps 4 --servers "${servers[@]}" --goal "1.8 for the train phase"
            began=$SECONDS
            qwen3_5 step qwen3.5-2b-server-lora "${lora[*]}" --random-weights --lengths constant:256 --ours tokens16384 \
                --stock mbs16 --rounds 1 --steps 4 --servers "${servers[@]}" --goal "1.8 for the train phase" ;;
        # The whole step on two GPUs: both train and generate, or one trains while a server on the other one generates.
        two-colocated)
            group two-colocated-128
            group two-colocated-256 ;;
        # Adapters of 8B, whose weights take most of a decoding step.
        two-colocated-8b)
            colocated_8b two-colocated-8b-lora-128 2 ;;
        two-server-8b)
            with_servers 8b on "--vllm_gpu_memory_utilization 0.6" behind_server_8b two-server-8b-lora-128 1 ;;
        # Four GPUs generate and train, or two of them generate, each with an engine, and two train.
        four-colocated-8b)
            colocated_8b four-colocated-8b-lora-256 4 ;;
        four-server-8b)
            server_gpus=2 with_servers 8b on "--vllm_gpu_memory_utilization 0.6 --vllm_data_parallel_size 2" \
                behind_server_8b four-server-8b-lora-256 2 ;;
        two-colocated-*)
            bench step "two-colocated-1.7b-${1##*-}" 1.7b --random-weights "${fixed[@]}" --rounds 1 --steps 6 \
                --warm-up 2 --completions "${1##*-}" --ours dp2+tokens16384 --flags "$vllm_1b --sleep_level 0" ;;
        two-server | two-server-*)
            with_servers 1.7b on "--vllm_gpu_memory_utilization 0.4" group "two-behind${1#two}" ;;
        two-behind-server)
            group two-behind-server-128
            group two-behind-server-256 ;;
        two-behind-server-*)
            bench step "two-server-1.7b-${1##*-}" 1.7b --random-weights "${fixed[@]}" --rounds 1 --steps 7 \
                --warm-up 3 --timeout 420 --completions "${1##*-}" --ours tokens16384 --servers "${servers[@]}" \
                --flags "--async_generate true --rollout_importance_sampling_mode token_truncate" ;;
        # The weight sync to a server on another GPU: all weights of 4B, and of 8B and 30B with adapters merged into them.
        # The servers of a group start together.
        sync)
            local pids=() urls=()
            start_servers 8b on "$eager {$dummy,$cache}"
            start_servers 4b on "$eager {$dummy,$cache}"
            while_servers_run sync_8b_and_4b "${urls[@]}"
            stop_servers ;;
        sync-30b)
            local pids=() urls=()
            start_servers 30b-qwen3-moe on "$eager {$dummy,$cache}"
            while_servers_run sync sync-30b-a3b-lora 30b-qwen3-moe "${urls[0]}" "${moe[*]} ${lora[*]}" "1 s"
            stop_servers ;;
        # One GPU, and layouts of two and four, with as many completions for each GPU.
        dp1-8b-lora | dp2-8b-lora | dp4-8b-lora)
            layout_of_8b "$1" "${1%%-*}+tokens$tokens_layout" ;;
        tp2-8b-lora | tp4-8b-lora)
            layout_of_8b "$1" "${1%%-*}+sp+tokens$((${1:2:1} * tokens_layout))" ;;
        pp2-8b-lora | pp4-8b-lora)
            layout_of_8b "$1" "${1%%-*}+tokens$((tokens_layout / ${1:2:1}))" ;;
        # 10 layers on each of the first three stages and 6 on the last one, which has the output layer. A pipeline of
        # more micro batches waits less at its ends; products of larger ones are faster.
        pp4-8b-lora-last-6)
            layout_of_8b "$1" "pp4+tokens$((tokens_layout / 4)) pp4+tokens$((tokens_layout / 2))" \
                --decoder_last_pipeline_num_layers "$([ -n "${DRY:-}" ] && echo 1 || echo 6)" ;;
        # The image part is frozen, as in ms-swift's defaults.
        vl-qwen2.5)
            images qwen2.5-vl-3b 3b-qwen2.5-vl "" mbs8 mbs4 ;;
        vl-qwen2.5-lora)
            images qwen2.5-vl-3b-lora 3b-qwen2.5-vl "${lora[*]}" mbs8 ;;
        vl-qwen3)
            images qwen3-vl-2b 2b-qwen3-vl "" mbs8 mbs4 ;;
        vl-qwen3-lora)
            images qwen3-vl-2b-lora 2b-qwen3-vl "${lora[*]}" mbs8 ;;
        # Prompts that a group shares, against repeated ones and ms-swift's trainer.
        share-1.7b | share-8b-lora)
            for cell in 2048-8 8192-8 512-8 2048-16 8192-16 512-16; do
                group "$1-$cell"
            done ;;
        share-1.7b-*)
            share 1.7b 1.7b "" $(cut -d- -f3 <<<"$1") ${1##*-} ;;
        share-8b-lora-*)
            share 8b-lora 8b "${lora[*]}" $(cut -d- -f4 <<<"$1") ${1##*-} ;;
        # All weights of a mixture of experts: a quarter of the layers and half of the experts of Qwen3-30B-A3B.
        moe)
            bench train moe-4.5b 4.5b-qwen3-moe "${uneven[@]}" --ours tokens16384 tokens24576 --stock mbs8 mbs4 \
                --goal "3.0, MFU 35 %" --rounds 1 --flags "${moe[*]}" ;;
        moe-even)
            bench train moe-4.5b-even 4.5b-qwen3-moe "${uneven[@]}" --ours tokens16384 --stock mbs8 --rounds 1 \
                --goal "3.0, MFU 35 %" --flags "${moe[*]} $even" ;;
        moe-step)
            bench step moe-4.5b-step 4.5b-qwen3-moe --random-weights "${fixed[@]}" --completions 64 --ours tokens16384 \
                --stock mbs8 --rounds 1 --flags "$graphs '{$dummy,$decoding}' --sleep_level 2 ${moe[*]}" ;;
        moe-server)
            with_servers 4.5b-qwen3-moe "on off" "$graphs {$dummy,$cache,$decoding}" group moe-behind-servers ;;
        moe-behind-servers)
            bench step moe-4.5b-server 4.5b-qwen3-moe --random-weights "${fixed[@]}" --completions 64 --ours tokens16384 \
                --stock mbs8 --rounds 1 --servers "${servers[@]}" --flags "${moe[*]}" ;;
        # Adapters of Qwen3-30B-A3B, with as many completions as one GPU trains in a step. A first step of ms-swift's
        # trainer took 142 s with 4 completions in a micro batch and 78 s with 8.
        moe-30b-lora)
            bench train moe-30b-a3b-lora 30b-qwen3-moe "${uneven[@]}" --ours tokens12288 --stock mbs8 \
                --goal 2.5 --rounds 1 --steps 3 --timeout 420 --profile --flags "${moe[*]} ${lora[*]}" ;;
        # The same without ms-swift's trainer, also with random choices instead of random weights of routers.
        moe-30b-lora-even)
            for routers in random even; do
                bench train moe-30b-a3b-lora-$routers 30b-qwen3-moe "${uneven[@]}" --ours tokens12288 --rounds 1 --steps 3 \
                    --profile --flags "${moe[*]} ${lora[*]} $([ $routers = random ] || echo "$even")"
            done ;;
        # What a layer does but its experts, for all GPUs that are visible.
        dispatch)
            ranks=$([ -n "${DRY:-}" ] && echo 2 || "$python" -c "import torch; print(torch.cuda.device_count())")
            "$python" -m torch.distributed.run --standalone --nproc_per_node "$ranks" -m benchmarks.bench_dispatch \
                --json "$out/parts/dispatch-$ranks$suffix.json" ${DRY:+--dry} ;;
        # Half or a quarter of the experts on each GPU.
        moe-30b-lora-ep2)
            experts_apart moe-30b-a3b-lora-ep2 30b-qwen3-moe $tokens_ep2 "${lora[*]}" --profile ;;
        moe-30b-lora-ep4)
            experts_apart moe-30b-a3b-lora-ep4 30b-qwen3-moe $tokens_ep4 "${lora[*]}" --profile ;;
        moe-30b-lora-even-ep2)
            experts_apart moe-30b-a3b-lora-even-ep2 30b-qwen3-moe $tokens_ep2 "${lora[*]} $even" --profile ;;
        moe-30b-lora-even-ep4)
            experts_apart moe-30b-a3b-lora-even-ep4 30b-qwen3-moe $tokens_ep4 "${lora[*]} $even" --profile ;;
        # All weights. With moments in fp32 they do not fit into four H200, on H100 not at all.
        moe-30b-full-ep4)
            experts_apart moe-30b-a3b-full-ep4 30b-qwen3-moe 6144 "${bf16_moments[*]}" ;;
        moe-35b-lora-ep2)
            adapters_of_35b qwen3.5-35b-a3b-lora-ep2 $tokens_35b_ep2 ;;
        moe-35b-lora-ep4)
            adapters_of_35b qwen3.5-35b-a3b-lora-ep4 $tokens_35b_ep4 ;;
        # Two GPUs generate with half of the experts each, and report them; two train with the same division.
        moe-30b-server-ep2)
            server_gpus=2 with_servers 30b-qwen3-moe on "--vllm_tensor_parallel_size 2 --vllm_enable_expert_parallel true \
$graphs {$dummy,$cache,$decoding,\"enable_return_routed_experts\":true}" group moe-30b-behind-server ;;
        moe-30b-behind-server)
            for mode in R3 disabled; do
                began=$SECONDS
                bench step moe-30b-a3b-lora-server-ep2-$mode 30b-qwen3-moe --random-weights "${fixed[@]}" \
                    --completions 128 --rounds 1 --steps 3 --timeout 420 --ours dp2+ep2+tokens$tokens_ep2 \
                    --servers "${servers[@]}" --flags "${moe[*]} ${lora[*]} --router_replay_mode $mode"
            done ;;
        # Generation behind a server and in the training process, and with other settings of vLLM.
        server-*)
            part server-"${1#*-}" bench_server --shape "${1#*-}" --profile ;;
        generation-8b)
            part generation-8b bench_generation --shape 8b --variants default fp8_per_channel --rounds 2 --profile ;;
        generation-30b)
            part generation-30b bench_generation --shape 30b-qwen3-moe --variants default fp8_per_channel --rounds 2 \
                --memory 0.95 --profile ;;
        # As many completions as in step-lora-30b, whose routers send most tokens to a few experts; vLLM's own random
        # weights do not.
        generation-30b-64)
            part generation-30b-64 bench_generation --shape 30b-qwen3-moe --completions 64 --rounds 2 --memory 0.95 \
                --variants graphs_alone fp8_graphs_alone default fp8_per_channel ;;
        generation-long)
            part generation-long bench_generation --shape 1.7b --prompt-tokens 4096 --group-size 16 --tokens 256 \
                --variants default no_prefix_caching first_runner cascade --rounds 2 ;;
        generation-attention-*)
            part "$1" bench_generation --shape "${1##*-}" --rounds 2 --timeout 300 --profile \
                --variants default triton_attention one_split flashinfer flash_attention_2 ;;
        draft-rows)
            part draft-rows bench_draft_rows --shapes 8b 1.7b 30b-qwen3-moe --limit 560 ;;
        draft-rows-v1)
            part draft-rows-v1 bench_draft_rows --shapes 8b 30b-qwen3-moe --arms v1 v1-drafts-4 --limit 560 ;;
        gpu-tests-*)
            local tests=${1#gpu-tests-}
            "$python" -m benchmarks.gpu_tests --json "$out/parts/tests-$tests.json" ${tests//,/ } -- -q ;;
        *)
            echo "bench_h200: unknown group $1; the head of this file lists the groups" >&2
            exit 2 ;;
    esac
}

for name in "$@"; do
    began=$SECONDS
    group "$name"
done
