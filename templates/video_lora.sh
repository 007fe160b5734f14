#!/usr/bin/env bash
# GRPO of a LoRA adapter on rows with videos, with vLLM in the training processes.
#   MODEL=Qwen/Qwen3-VL-4B-Instruct DATASET=data.jsonl OUTPUT=output templates/video_lora.sh [flags that override these]
# DATASET: one JSON object per line, with `messages` (a <video> for each video), `videos` (paths, URLs or base64 of MP4,
# MOV, MKV, WebM or AVI files) and the columns that the reward functions read (`solution` for accuracy).
set -euo pipefail

# Number of ranks on this machine. On several machines also set NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT.
export NPROC_PER_NODE=${NPROC_PER_NODE:-4}
# Avoid memory fragmentation when vLLM and the trainer use the GPU alternately.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# Frames that are shown of a video: two per second, up to so many, of which two are one patch in time.
export FPS_MAX_FRAMES=${FPS_MAX_FRAMES:-32}
# Larger frames are scaled down: tokens of each two, of 32 x 32 pixels (Qwen2.5-VL: 28 x 28). A video has 16 * 128.
export VIDEO_MAX_TOKEN_NUM=${VIDEO_MAX_TOKEN_NUM:-128} VIDEO_MIN_TOKEN_NUM=${VIDEO_MIN_TOKEN_NUM:-16}

args=(
    --rlhf_type grpo                         # the algorithm
    --model "${MODEL:-Qwen/Qwen3-VL-4B-Instruct}" # hub name or folder
    --torch_dtype bfloat16                   # precision of weights and activations

    # Adapter. vLLM receives base weights and adapter merged; the trainer never changes the base weights.
    --tuner_type lora                        # train an adapter
    --lora_rank 32                           # rank of the adapter matrices
    --lora_alpha 64                          # the adapter is scaled by alpha / rank
    --lora_dropout 0                         # dropout would make the trained policy differ from the one that generated
    --target_modules all-linear              # layers with an adapter: those of the parts that are not frozen
    --freeze_vit true                        # false: adapters in the vision tower as well
    --freeze_aligner true                    # false: adapters between vision tower and language model as well
    --merge_lora true                        # also save checkpoint-N-merged, which loads without peft

    # Parallel layout: ranks = TP * PP * CP * DP.
    --tensor_model_parallel_size 1           # TP: a larger model may need 2, with --sequence_parallel true
    --attention_backend flash                # without flash-attn: torch's kernel, or fused (cuDNN)
    --recompute_granularity none             # to save memory: full, which takes a third more FLOPs

    # Data and rewards.
    --dataset "${DATASET:?set a file or hub name}" # one JSON object per line, with `messages` and `videos`
    --reward_funcs accuracy                  # needs pip install ".[math]" and a column `solution`

    # Batch sizes count completions.
    --num_generations 8                      # completions per prompt
    --global_batch_size 64                   # completions per optimizer step
    --max_tokens_per_micro_batch 16384       # tokens of one forward and backward pass; less needs less memory
    --max_length 2048                        # tokens of a prompt, a video counting as one
    --max_completion_length 1024             # tokens of a completion, at most

    # Generation with vLLM in the training processes.
    --use_vllm true                          # generate with vLLM
    --vllm_mode colocate                     # vLLM runs in the training processes
    --vllm_tensor_parallel_size 2            # ranks that share one vLLM engine
    --vllm_gpu_memory_utilization 0.5        # share of the GPU memory for vLLM
    --vllm_max_model_len 6144                # tokens of a prompt, its videos and a completion
    --sleep_level 2                          # vLLM frees all memory while training; each sync sends merged weights
    --offload_model true                     # weights may be offloaded during generation, if not everything fits

    # Optimization.
    --train_iters 500                        # optimizer steps
    --lr 1e-5                                # ten times the learning rate of full-parameter training
    --beta 0.001                             # weight of the KL term; the reference is the model without adapter

    # Output.
    --output_dir "${OUTPUT:-output}"         # logs and checkpoints
    --save_steps 50                          # steps between checkpoints
    --logging_steps 1                        # log every step
    --log_completions true                   # write completions and rewards to a file
)
exec megatron rlhf "${args[@]}" "$@"
