"""The flags that this package adds to ms-swift's, each with its help text. Their values are checked in *_checks.py.

argparse %-formats help texts: a percent sign is written `%%`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from swift.megatron.arguments import MegatronRLHFArguments

from swift_megatron_grpo.config import Estimator, KlEstimator, SharePrompts, SyncCheckMode, UnreadTensors
from swift_megatron_grpo.types import Quantization


@dataclass
class GRPOFlags(MegatronRLHFArguments):
    """Flags of `megatron rlhf --rlhf_type grpo` beyond ms-swift's."""

    vllm_mode: Literal["server", "colocate"] | None = "colocate"  # ms-swift has no default, and stops without one
    lora_dropout: float = 0.0  # as in effect in ms-swift, whose default of 0.05 mcore-bridge ignores
    save_missing_weights: bool | None = field(
        default=None,
        metadata={
            "help": "Copy the tensors of the checkpoint that the model does not have into saved models, as they were. "
            "Default: copy layers of multi-token prediction and, with --language_model_only true, the image, video and "
            "audio parts; other tensors are left out."
        },
    )
    truncation_strategy: Literal["left", "delete", "raise", "right", "split"] | None = field(
        default=None,
        metadata={
            "help": "What to do with prompts longer than --max_length. left: cut their beginning. delete: leave them "
            "out of the dataset before training. raise: refuse the dataset, with the rows. Default: left."
        },
    )
    bad_reward: Literal["stop", "drop"] = field(
        default="stop",
        metadata={
            "help": "What to do when a completion has no valid reward: every reward function returned None, or one "
            "returned NaN or infinity, or raised an exception. stop: the run ends with an error that names the "
            "function and the completion. drop: the completion is excluded from its group's statistics and is not "
            "trained. Default: stop."
        },
    )

    advantage_estimator: Estimator = field(
        default="grpo",
        metadata={
            "help": "The baseline that is subtracted from a reward. grpo: the mean of the prompt's completions. rloo: "
            "the mean of the prompt's other completions. reinforce_plus_plus: the baseline of grpo, with advantages "
            "scaled over the batch (the paper's REINFORCE++-baseline). reinforce_plus_plus_plain: the mean of the "
            "whole rollout (the paper's REINFORCE++); it also works with --num_generations 1. The first three are "
            "ms-swift's. Default: grpo."
        },
    )
    kl_estimator: KlEstimator | None = field(
        default=None,
        metadata={
            "help": "Estimator of the KL to the reference, per token: k1 is log(pi/ref), abs is its absolute value, "
            "k2 is half its square, k3 is ref/pi - 1 - log(ref/pi). Default: ms-swift's, which is k3 in the loss and "
            "k1 in the reward (--kl_in_reward)."
        },
    )
    kl_target: float | None = field(
        default=None,
        metadata={
            "help": "KL per token towards which beta is adapted: beta grows while the measured KL is above the target "
            "and shrinks while it is below. --beta is the initial value. Default: none, beta is fixed."
        },
    )
    kl_horizon: int = field(
        default=10000,
        metadata={
            "help": "Number of completions over which --kl_target adapts beta; a larger number adapts more slowly. "
            "Default: 10000."
        },
    )
    dual_clip: float | None = field(
        default=None,
        metadata={
            "help": "Bound on the loss of tokens with a negative advantage: at most this value times the advantage's "
            "size, however large the ratio is. It must be above 1 + epsilon_high; 3 is common. --delta is ms-swift's "
            "flag for the same bound. Default: none."
        },
    )
    entropy_coef: float = field(
        default=0.0,
        metadata={
            "help": "Weight of the entropy bonus: the policy's entropy times this value is subtracted from the loss, "
            "averaged in the same way as the loss. Default: 0, no bonus."
        },
    )

    max_tokens_per_micro_batch: int | None = field(
        default=None,
        metadata={
            "help": "Token budget of a packed micro batch, including prompts and padding. Completions are packed up to "
            "this budget, the work is balanced across data-parallel ranks, and --micro_batch_size is ignored. A "
            "completion longer than the budget gets its own micro batch. Default: none, a micro batch has "
            "--micro_batch_size completions."
        },
    )
    infer_max_tokens_per_micro_batch: int | None = field(
        default=None,
        metadata={
            "help": "Token budget of a packed micro batch in forward-only passes, which compute log-probs and need "
            "less memory than training. Default: the micro batches of training."
        },
    )
    infer_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Number of completions in a micro batch of forward-only passes; an alternative to "
            "--infer_max_tokens_per_micro_batch. Default: the micro batches of training."
        },
    )

    share_prompts: SharePrompts = field(
        default="auto",
        metadata={
            "help": "true: in a micro batch, the completions of a prompt share one copy of it, forward and backward, "
            "which is exact. Token budgets count the copy once, so more completions fit. auto: the same where layout "
            "and model allow it and a step saves a twentieth of its FLOPs. false: every completion has a copy. "
            "Default: auto."
        },
    )
    unread_tensors: UnreadTensors = field(
        default="stop",
        metadata={
            "help": "What to do if a checkpoint has tensors that nothing loads, so that they would be neither trained "
            "nor sent to vLLM. stop: the run ends with an error that names them. warn: they are logged and left out. "
            "Layers of multi-token prediction and buffers that are computed are always left out. Default: stop."
        },
    )
    check_attention: bool = field(
        default=True,
        metadata={
            "help": "Compare output and gradients of the model's attention kernels with exact arithmetic before "
            "training, on random packed sequences, and end the run if one is wrong. It takes about a second. "
            "Default: true."
        },
    )
    fast_kernels: bool = field(
        default=True,
        metadata={
            "help": "Multiply all experts of a layer in one kernel, without expert parallelism do not sort tokens that "
            "are sorted by expert already, with it send a token's row once to a rank, and add adapters inside the "
            "products of their layers. On GPUs, also use Transformer Engine's kernels for rotary embedding, SwiGLU, "
            "norms and the accumulation of weight gradients, and this package's for SwiGLU of experts, where they "
            "compute the same as Megatron's. false: use Megatron's. Default: true."
        },
    )
    recompute_elementwise: bool = field(
        default=False,
        metadata={
            "help": "On GPUs, recompute the outputs of norms and SwiGLU in the backward pass instead of storing them, "
            "in micro batches of 4,096 tokens or more. This saves a quarter of activation memory and costs 5 to 7 %% "
            "of the time. It requires --fast_kernels. Default: false."
        },
    )
    ref_tensor_model_parallel_size: int | None = field(
        default=None,
        metadata={
            "help": "Tensor-parallel size of the frozen reference copy (full tuning with --beta above 0), which needs "
            "less memory than the trained model. Every --ref_..._parallel_size flag that is omitted takes the size of "
            "training. Default: as in training."
        },
    )
    ref_pipeline_model_parallel_size: int | None = field(
        default=None, metadata={"help": "Pipeline-parallel size of the frozen reference copy. Default: as in training."}
    )
    ref_context_parallel_size: int | None = field(
        default=None, metadata={"help": "Context-parallel size of the frozen reference copy. Default: as in training."}
    )
    ref_expert_model_parallel_size: int | None = field(
        default=None, metadata={"help": "Expert-parallel size of the frozen reference copy. Default: as in training."}
    )
    ref_expert_tensor_parallel_size: int | None = field(
        default=None,
        metadata={"help": "Expert-tensor-parallel size of the frozen reference copy. Default: as in training."},
    )

    eval_before_train: bool = field(
        default=False,
        metadata={
            "help": "Evaluate before the first training step as well, for a base line. A run that resumes does not. "
            "Default: false; evaluation runs every --eval_steps and after the last step."
        },
    )
    eval_names: list[str] | None = field(
        default=None,
        metadata={
            "help": "Names of the datasets in --val_dataset, in their order, under which the metrics of each are "
            "logged. Default: the names of the files or hub ids, if there are several datasets."
        },
    )
    eval_temperature: float | None = field(
        default=None,
        metadata={
            "help": "Temperature of completions in evaluation; 0 is greedy, with one completion of each prompt. "
            "Default: --temperature."
        },
    )
    eval_top_p: float | None = field(
        default=None, metadata={"help": "top_p of completions in evaluation. Default: --top_p."}
    )
    eval_max_completion_length: int | None = field(
        default=None,
        metadata={"help": "Most tokens of a completion in evaluation. Default: --max_completion_length."},
    )
    eval_correct_reward: str | None = field(
        default=None,
        metadata={
            "help": "The reward function of --reward_funcs that decides, for pass@k and maj@k, if a completion is "
            "correct. Default: the first."
        },
    )
    eval_correct_from: float = field(
        default=1.0,
        metadata={"help": "Value of that function from which a completion is correct. Default: 1."},
    )

    router_agreement_samples: int = field(
        default=0,
        metadata={
            "help": "Number of completions of each rollout for which the experts that the trainer's routers choose are "
            "compared with those that vLLM chose, in one forward pass: rollout/router_agreement is the share of tokens "
            "and layers with the same experts. It shows whether --router_replay_mode R3 is worth its bytes: "
            "docs/moe.md. Default: 0, no comparison."
        },
    )

    sync_check: SyncCheckMode = field(
        default="canary",
        metadata={
            "help": "Verification, after every weight sync, that vLLM runs the trained weights. canary: the names and "
            "shapes of the tensors that were sent equal those of the previous sync, and trainer and vLLM agree on the "
            "log-probs of a fixed text up to rounding; the first sync of a run is verified as with full. full: a "
            "checksum of every tensor is also verified. A sync that fails is repeated once; if it fails again, the "
            "run stops and names the tensors that differ. off: no verification. With --vllm_enable_lora true no "
            "checksum is verified, not even in the first sync: vLLM must have a module for each of the adapter's, and "
            "the log-probs must agree. Default: canary."
        },
    )
    rollout_quantization: Quantization = field(
        default="none",
        metadata={
            "help": "fp8: vLLM generates with weights and activations in 8 bits, which it quantizes after every sync. "
            "It needs a GPU that multiplies in FP8 (Ada, Hopper or newer); start `swift rollout` with the same flag, "
            "and set --rollout_importance_sampling_mode token_truncate. docs/quantization.md has more. Default: none."
        },
    )
    offload_grad: bool = field(
        default=False,
        metadata={
            "help": "Allow the gradient buffers to leave the GPU while vLLM generates and log-probs are computed, in "
            "addition to --offload_model and --offload_optimizer. The buffers are empty between steps, so they are "
            "freed and not copied. As with those two flags, nothing is moved while everything fits. Default: false."
        },
    )

    reward_timeout: float | None = field(
        default=None,
        metadata={
            "help": "Time limit in seconds for one reward function on one rank's share of a rollout. If a function "
            "exceeds it, the run ends with an error that names the function. Default: none, only --phase_timeout "
            "applies."
        },
    )
    phase_timeout: float = field(
        default=3600.0,
        metadata={
            "help": "Time limit in seconds, on every rank, for one phase of a step (generation, grading, training, "
            "...) and for the work between two phases (checkpoints, callbacks). If a rank exceeds it, every rank "
            "writes its Python stacks and unfinished collectives to stuck-<time>.txt in --output_dir, and the run "
            "ends. 0: no limit. Default: 3600."
        },
    )
    stop_grace: float = field(
        default=120.0,
        metadata={
            "help": "Time in seconds between SIGTERM or SIGINT and the end of all processes; set it to what a cluster "
            "waits before it sends SIGKILL. On either signal the run ends the current step, saves a checkpoint and "
            "exits with 143 or 130. A step in which completions are still generated or graded after half of this time "
            "is given up, and the checkpoint is that of the step before. A second signal ends the run at once. "
            "Default: 120."
        },
    )
    rollout_dump: str | None = field(
        default=None,
        metadata={
            "help": "Folder to which every rollout of this run is written: the tokens and rewards of each completion, "
            "as JSON lines. docs/dump_and_replay.md describes the format. Default: none, rollouts are not written."
        },
    )
    rollout_replay: str | None = field(
        default=None,
        metadata={
            "help": "Folder written by --rollout_dump of another run: train on its completions and rewards, without "
            "starting vLLM or calling reward functions. Default: none."
        },
    )
    rollout_only: bool = field(
        default=False,
        metadata={
            "help": "Generate, grade and write the rollouts of this run (--rollout_dump) with the initial weights, "
            "without training. Default: false."
        },
    )
    resume: str = field(
        default="never",
        metadata={
            "help": "auto: continue from the newest whole checkpoint in --output_dir or in one of its version folders, "
            "in the folder of that run; incomplete and damaged checkpoints are skipped, with a line in the log. "
            "Without a checkpoint the run starts with step 1, and a run that has done all its steps ends at once. "
            "Rollouts that --rollout_dump has stored beyond the checkpoint are trained without being generated again. "
            "A folder checkpoint-N: continue from it. never: start with step 1, unless --finetune false and "
            "--mcore_model or --mcore_adapter name a checkpoint. docs/checkpoints.md describes it. Default: never."
        },
    )
    verify_checkpoint: bool = field(
        default=True,
        metadata={
            "help": "Verify checkpoints before they are loaded: every file against the size and the checksum in "
            "manifest.json, the model, and when a run resumes the tokenizer. A damaged or incomplete checkpoint is "
            "refused, and the error names a whole one. false: files are not verified, and differences are only logged. "
            "Default: true."
        },
    )
    vllm_server_api_key: str | None = field(
        default=None,
        metadata={
            "help": "The --api_key of the rollout servers. Servers and trainer also read it from the environment "
            "variable SWIFT_ROLLOUT_API_KEY, or from the file that SWIFT_ROLLOUT_API_KEY_FILE names. As a flag it is "
            "visible in process listings until the command has read it. It is never written to args.json. Default: "
            "none."
        },
    )
    vllm_request_timeout: float = field(
        default=3600.0,
        metadata={
            "help": "Time limit in seconds for a rollout server to complete one request or to load new weights; a "
            "request that exceeds it is resent to another server. It must be longer than the longest completion takes, "
            "time in the queue included; with several turns, longer than the longest conversation. Default: 3600."
        },
    )
    seed_completions: bool = field(
        default=False,
        metadata={
            "help": "Give every completion its own seed, derived from --seed. Up to rounding, completions then do not "
            "depend on which server generates them or on what else it is generating. In multi-turn conversations every "
            "turn has its own seed. vLLM samples seeded completions one at a time, which costs about 10 microseconds "
            "per completion and token on a GPU. Default: false."
        },
    )
    rollout_logprobs_interval: int = field(
        default=10,
        metadata={
            "help": "vLLM returns the log-probs of completions with every Nth rollout only, because they cost up to a "
            "sixth of the time of generation: the steps on other rollouts log no rollout/k3_kl. 1: with every rollout. "
            "0: with the first one only, which is always compared with the trainer's. The interval has no effect where "
            "the loss, --log_rollout_offpolicy_metrics or --rollout_dump reads them: they come with every rollout. "
            "Default: 10."
        },
    )
    max_staleness: int | None = field(
        default=None,
        metadata={
            "help": "With --async_generate true: the number of rollouts by which generation may be ahead of training. "
            "1: the next rollout is generated while one is trained, with the weights from before that training. 0: "
            "generation and training alternate, as without --async_generate. docs/async.md describes the effect on "
            "the loss. Default: 1."
        },
    )
    trace_steps: str | None = field(
        default=None,
        metadata={
            "help": "Optimizer steps to trace, such as 3 or 3-5: trace.json in --output_dir then has the phases of all "
            "ranks and the requests of all servers on one time line, for https://ui.perfetto.dev. Default: none."
        },
    )
    check: bool = field(
        default=False,
        metadata={
            "help": "Do not train. In one process, without a GPU and without weights: check all flags, read the "
            "dataset, call the reward functions with made-up answers, and print the layout, the batches, the memory of "
            "each GPU by phase, a guess of the time, and settings that fit if these do not. docs/check.md has an "
            "example. Default: false."
        },
    )
    check_gpu: str | None = field(
        default=None,
        metadata={
            "help": "With --check true: the GPU of the run, such as A100-80G, H100-80G or H200-141G. Default: the GPU "
            "of this machine, or H100-80G without one."
        },
    )
