#!/usr/bin/env bash
# GRPO of a LoRA adapter of Qwen3-Omni on rows with text, images, audio and videos, with vLLM in the training processes.
#   MODEL=Qwen/Qwen3-Omni-30B-A3B-Instruct DATASET=data.jsonl OUTPUT=output templates/omni_lora.sh [flags]
# Given flags override those below. Needs pip install ".[omni]". DATASET: one JSON object per line, with `messages` (an
# <image>, <audio> or <video> for each), `images`, `audios` and `videos` (paths, URLs or base64) and the columns that the
# reward functions read (`solution` for accuracy).
set -euo pipefail

# Number of ranks on this machine. On several machines also set NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT.
export NPROC_PER_NODE=${NPROC_PER_NODE:-8}
# Avoid memory fragmentation when vLLM and the trainer use the GPU alternately.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# Frames that are shown of a video: two per second, up to so many, of which two are one patch in time.
export FPS_MAX_FRAMES=${FPS_MAX_FRAMES:-32}
# Larger frames are scaled down: tokens of each two, of 32 x 32 pixels. A video has up to 16 * 128.
export VIDEO_MAX_TOKEN_NUM=${VIDEO_MAX_TOKEN_NUM:-128} VIDEO_MIN_TOKEN_NUM=${VIDEO_MIN_TOKEN_NUM:-16}

args=(
    --rlhf_type grpo                         # the algorithm
    --model "${MODEL:-Qwen/Qwen3-Omni-30B-A3B-Instruct}" # hub name or folder
    --torch_dtype bfloat16                   # precision of weights and activations

    # Adapter. vLLM receives base weights and adapter merged; the trainer never changes the base weights.
    --tuner_type lora                        # train an adapter of the thinker; talker and vocoder are saved unchanged
    --lora_rank 16                           # rank of the adapter matrices
    --lora_alpha 32                          # the adapter is scaled by alpha / rank
    --lora_dropout 0                         # dropout would make the trained policy differ from the one that generated
    --target_modules all-linear              # layers with an adapter: experts as well, but not the router
    --freeze_vit true                        # false: adapters in the image and audio parts as well
    --freeze_aligner true                    # false: adapters between them and the language model as well
    --merge_lora true                        # also save checkpoint-N-merged: peft leaves out adapters of experts

    # Parallel layout. EP divides the experts over ranks of DP * TP. LoRA requires expert_tensor_parallel_size 1.
    --tensor_model_parallel_size 2           # TP: ranks that share each layer
    --sequence_parallel true                 # divide activations between TP ranks as well
    --expert_model_parallel_size 8           # EP: ranks that share the experts of a layer
    --moe_grouped_gemm true                  # one matrix product for all experts of a rank
    --moe_permute_fusion true                # fused kernels that sort tokens by expert
    --attention_backend flash                # without flash-attn: torch's kernel, or fused (cuDNN)
    --recompute_granularity none             # to save memory: full, which takes a third more FLOPs

    # Data and rewards.
    --dataset "${DATASET:?set a file or hub name}" # one JSON object per line, with `messages` and media
    --max_pixels 602112                      # larger images are scaled down: 588 tokens of 32 x 32 pixels
    --reward_funcs accuracy                  # needs pip install ".[math]" and a column `solution`

    # Batch sizes count completions.
    --num_generations 8                      # completions per prompt
    --global_batch_size 64                   # completions per optimizer step
    --max_tokens_per_micro_batch 16384       # tokens of one forward and backward pass; less needs less memory
    --max_length 2048                        # tokens of a prompt, an image, a video or a recording counting as one
    --max_completion_length 1024             # tokens of a completion, at most

    # Generation with vLLM in the training processes.
    --use_vllm true                          # generate with vLLM
    --vllm_mode colocate                     # vLLM runs in the training processes
    --vllm_tensor_parallel_size 2            # ranks that share one vLLM engine and its experts
    --vllm_gpu_memory_utilization 0.5        # share of the GPU memory for vLLM
    --vllm_max_model_len 8192                # tokens of a prompt, its media and a completion
    --sleep_level 1                          # while training, vLLM moves its weights to the CPU and frees its cache
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
