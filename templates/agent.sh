#!/usr/bin/env bash
# Full-parameter GRPO of an agent that calls the model as it would call OpenAI's.
#   MODEL=Qwen/Qwen3-1.7B DATASET=data.jsonl OUTPUT=output templates/agent.sh [flags that override these]
# vLLM and the agents run in the training processes. Behind a server, give `swift rollout` the flags of the agent:
# docs/agents.md.
# DATASET: one JSON object per line, with `messages` and the columns that the agent reads.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# Number of ranks on this machine.
export NPROC_PER_NODE=${NPROC_PER_NODE:-2}
# Avoid memory fragmentation when vLLM and the trainer use the GPU alternately.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

args=(
    --rlhf_type grpo                         # the algorithm
    --model "${MODEL:-Qwen/Qwen3-1.7B}"      # hub name or folder
    --torch_dtype bfloat16                   # precision of weights and activations
    --tuner_type full                        # train all weights

    # Parallel layout: ranks = TP * PP * CP * DP.
    --tensor_model_parallel_size 2           # TP: ranks that share each layer
    --sequence_parallel true                 # divide activations between TP ranks as well
    --attention_backend flash                # without flash-attn: torch's kernel, or fused (cuDNN)
    --recompute_granularity none             # to save memory: full, which takes a third more FLOPs

    # Data and agent. Functions in --reward_funcs are added to what the agent returns.
    --dataset "${DATASET:?set a file or hub name}" # one JSON object per line, with `messages`
    --agent "$here/plugins/calculator_agent.py:calculator_agent" # replace it with your own file and function
    --bad_reward drop                        # an agent that fails costs its completion alone
    --max_turns 16                           # calls of an agent, at most
    --max_length 1024                        # tokens of the row's own prompt, at most
    --max_completion_length 512              # tokens of an answer, at most

    # Tokens per forward and backward pass. A token budget packs any number of training sequences.
    --max_tokens_per_micro_batch 8192

    --num_generations 8                      # agents per row
    --global_batch_size 64                   # agents per optimizer step
    --temperature 1.0                        # of sampling; what an agent asks for has no effect

    # Generation with vLLM in the training processes.
    --use_vllm true                          # generate with vLLM
    --vllm_mode colocate                     # vLLM runs in the training processes
    --vllm_max_model_len 8192                # tokens of one call and its answer
    --vllm_tensor_parallel_size 1            # ranks that share one vLLM engine
    --vllm_gpu_memory_utilization 0.4        # share of the GPU memory for vLLM
    --sleep_level 2                          # vLLM frees all memory while training; each sync resends the weights
    --offload_model true                     # weights may be offloaded during generation, if not everything fits
    --offload_optimizer true                 # the same for optimizer states

    # Optimization.
    --train_iters 500                        # optimizer steps
    --lr 1e-6                                # learning rate
    --beta 0                                 # weight of the KL term; with 0 there is no reference model

    # Output.
    --output_dir "${OUTPUT:-output}"         # logs and checkpoints
    --save_steps 50                          # steps between checkpoints
    --logging_steps 1                        # log every step
    --log_completions true                   # write completions and rewards to a file
)
exec megatron rlhf "${args[@]}" "$@"
