#!/usr/bin/env bash
# Train SmolLM2-135M-Instruct on a task of reasoning_gym, and measure it on other problems.
#   templates/recipe.sh RECIPE FOLDER [flags of the trainer that override these]
# RECIPE: full, lora, boxed, dynamic, tool, fp8 or teacher on one device, servers on two. FOLDER: model, problems, log
# and output.
# MODEL=NAME trains another model, and rows in FOLDER/train.jsonl and FOLDER/held_out.jsonl another task. Without a GPU,
# steps are few and small: 64 completions of 16 tokens take 10 to 45 seconds on two cores.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
recipe=${1:?give a recipe: full, lora, boxed, dynamic, tool, fp8, teacher or servers} folder=$(mkdir -p "$2" && cd "$2" && pwd)
shift 2

sums='{"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}'
task=(chain_sum "$sums" "Answer with the number only.") # its name, its settings, what follows the question
form="" # of the answers of examples, which come before each question
template=dense_colocate_full.sh
cpu_dtype=float32 # five times as fast as bfloat16 on a CPU without instructions for it
flags=(--reward_funcs reasoning_task --external_plugins "$here/plugins/reasoning_task.py")
case $recipe in
full) ;; # all weights
lora)    # an adapter
    template=dense_colocate_lora.sh
    flags+=(--lora_rank 16 --lora_alpha 32 --lr 2e-4 --beta 0)
    ;;
boxed) # an answer in a format, scored by ms-swift's `accuracy`, which sees only a number
    task[1]='{"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}'
    task[2]="" form='{metadata[expression]} = {answer}. The answer is \boxed{{{answer}}}.'
    flags=(--reward_funcs boxed_number --external_plugins "$here/plugins/boxed_number.py" --max_length 512)
    ;;
dynamic) # groups of equal rewards teach nothing; they are replaced
    flags+=(--dynamic_sample true --max_resample_times 3)
    ;;
tool) # larger numbers, with a calculator
    template=multi_turn.sh task[1]='{"min_terms": 2, "max_terms": 3, "min_digits": 3, "max_digits": 4}'
    task[2]="Use the calculator."
    flags=(--external_plugins "$here"/plugins/{reasoning_task,calculator}.py --gym_env calculator --max_turns 3)
    flags+=(--train_iters 120 --eval_steps 40) # it learns fast
    ;;
fp8) # vLLM generates in 8 bits, and a weight per token corrects for it
    cpu_dtype=bfloat16
    flags+=(--rollout_quantization fp8 --rollout_importance_sampling_mode token_truncate)
    ;;
teacher) # a model that `full` has trained teaches the one before training; TEACHER=FOLDER names another one
    flags+=(--teacher_kl_coef 1)
    ;;
servers) # the next rollout is generated on another device while one is trained
    template=async_server.sh
    export SERVER_TP=1 SERVER_GPUS=${SERVER_GPUS-0} TRAIN_GPUS=${TRAIN_GPUS-1}
    ;;
*) echo "recipe.sh: there is no recipe $recipe; use full, lora, boxed, dynamic, tool, fp8, teacher or servers" >&2; exit 2 ;;
esac

model=()
if [ -z "${MODEL:-}" ]; then
    export MODEL=$folder/model
    [ -d "$MODEL" ] || swift-megatron-grpo get-model smollm2 "$MODEL"
    # What the model's own chat template adds. With it, a server of the trained model encodes the same prompts.
    echo -n "You are a helpful AI assistant named SmolLM, trained by Hugging Face" > "$folder/system.txt"
    model=(--model_type llama --template chatml --system "$folder/system.txt")
fi
if [ ! -e "$folder/train.jsonl" ]; then
    python "$here/plugins/reasoning_task.py" "$folder" "${task[@]}"
    [ -z "$form" ] || python "$here/plugins/worked_examples.py" "$folder" "$form"
fi
newest() { compgen -G "$folder/teacher/output/checkpoint-*" | sort -V | tail -1; }
if [ "$recipe" = teacher ]; then
    mkdir -p "$folder/teacher"
    if [ -z "${TEACHER:-}" ] && ! newest > /dev/null; then
        [ ${#model[@]} = 0 ] || ln -sfn ../model "$folder/teacher/model"
        ([ ${#model[@]} = 0 ] || unset MODEL && "$here/recipe.sh" full "$folder/teacher" "$@")
    fi
    flags+=(--teacher_model "${TEACHER:-$(newest)}")
fi
rm -rf "$folder/output" # ms-swift would append to the log of the last run

args=(
    "${model[@]}"
    --tensor_model_parallel_size 1 --sequence_parallel false --vllm_tensor_parallel_size 1 # 9 heads are not even
    --num_generations 8 --global_batch_size 256 --steps_per_generation 1 # 32 prompts, 8 completions each
    --max_tokens_per_micro_batch 16384 --max_length 256 --max_completion_length 64 --vllm_max_model_len 1024
    --vllm_gpu_memory_utilization 0.3 --sleep_level 0 # a small model leaves room for all of it
    --offload_model false --offload_optimizer false --offload_grad false
    --lr 1e-5 --lr_decay_style constant --train_iters 200
    --val_dataset "$folder/held_out.jsonl" --eval_before_train true --eval_steps 50
    --num_generations_eval 1 --eval_temperature 0 # greedy: eval_pass@1 is the accuracy
    --add_version false --no_save_optim true --no_save_rng true --report_to none
    "${flags[@]}"
)
on_cpu=()
if ! command -v nvidia-smi > /dev/null; then
    on_cpu=(--torch_dtype $cpu_dtype --vllm_enforce_eager true)
    args+=(--fp16 false --ddp_backend gloo --global_batch_size 64 --train_iters 20 --eval_steps 10 --save_steps 20)
    export SERVER_GPUS="" TRAIN_GPUS=""
fi
export SERVER_FLAGS="${model[*]} ${on_cpu[*]}" NPROC_PER_NODE=${NPROC_PER_NODE:-1}
OUTPUT=$folder/output DATASET=$folder/train.jsonl exec "$here/$template" "${args[@]}" "${on_cpu[@]}" "$@"
