"""The flags that this package adds to ms-swift's, each with its help text. What they may be is in arguments.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from swift.megatron.arguments import MegatronRLHFArguments

from swift_megatron_grpo.config import Estimator, KlEstimator, SyncCheckMode


@dataclass
class GRPOFlags(MegatronRLHFArguments):
    vllm_mode: Literal["server", "colocate"] | None = "colocate"  # ms-swift has no default, and stops without one
    bad_reward: Literal["stop", "drop"] = field(
        default="stop",
        metadata={
            "help": "What happens when a completion gets no valid reward: every reward function returned None, or one "
            "returned NaN or infinity. stop: the run stops and names the function and the completion. drop: the "
            "completion is left out of its group's statistics and is not trained. Default: stop."
        },
    )

    advantage_estimator: Estimator = field(
        default="grpo",
        metadata={
            "help": "The baseline of a reward. grpo: the mean of the prompt's completions. rloo: the mean of the "
            "others. reinforce_plus_plus: as grpo, scaled over the batch; the paper calls it REINFORCE++-baseline. "
            "reinforce_plus_plus_plain: the mean of the whole rollout, the paper's REINFORCE++; with it "
            "num_generations may be 1. The first three are ms-swift's. Default: grpo."
        },
    )
    kl_estimator: KlEstimator | None = field(
        default=None,
        metadata={
            "help": "How the KL to the reference is estimated per token: k1 is log(pi/ref), abs its absolute value, "
            "k2 half its square, k3 is ref/pi - 1 - log(ref/pi). Default: as ms-swift, k3 in the loss and k1 in "
            "the reward (--kl_in_reward)."
        },
    )
    kl_target: float | None = field(
        default=None,
        metadata={
            "help": "KL per token that beta is adapted to: it grows while the measured KL is above, and shrinks while "
            "it is below. --beta is where it starts. Default: none, beta is fixed."
        },
    )
    kl_horizon: int = field(
        default=10000,
        metadata={"help": "Completions over which --kl_target adapts beta; more is slower. Default: 10000."},
    )
    dual_clip: float | None = field(
        default=None,
        metadata={
            "help": "Bound of the loss where the advantage is negative: at most this times its size, however large "
            "the ratio. Above 1 + epsilon_high; 3 is usual. --delta is ms-swift's flag for the same bound. Default: "
            "none."
        },
    )
    entropy_coef: float = field(
        default=0.0,
        metadata={
            "help": "Weight of an entropy bonus: the loss is lowered by this times the policy's entropy, averaged as "
            "the loss is. Default: 0, no bonus."
        },
    )

    max_tokens_per_micro_batch: int | None = field(
        default=None,
        metadata={
            "help": "Token budget of a packed micro batch, prompts and padding included: completions fill micro "
            "batches up to it, and data-parallel ranks get equal work. --micro_batch_size is not used then. A "
            "completion longer than the budget gets a micro batch of its own. Default: none, and "
            "--micro_batch_size completions make a micro batch."
        },
    )
    infer_max_tokens_per_micro_batch: int | None = field(
        default=None,
        metadata={
            "help": "Token budget of a packed micro batch in passes that only compute log-probs, which need less "
            "memory than training. Default: micro batches as in training."
        },
    )
    infer_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Completions of a micro batch in passes that only compute log-probs: the same as "
            "--infer_max_tokens_per_micro_batch, counted in completions. Default: micro batches as in training."
        },
    )

    fast_kernels: bool = field(
        default=True,
        metadata={
            "help": "On GPUs, Transformer Engine's kernels for rotary embedding, SwiGLU, norms and the sum of weight "
            "gradients, where they compute the same as Megatron's. false: Megatron's. Default: true."
        },
    )
    recompute_elementwise: bool = field(
        default=False,
        metadata={
            "help": "On GPUs, make the outputs of norms and SwiGLU again in backward instead of keeping them, in micro "
            "batches of 4,096 tokens and more: a quarter less memory for activations, for 5 to 7 % of the time. Comes "
            "with --fast_kernels. Default: false."
        },
    )
    ref_tensor_model_parallel_size: int | None = field(
        default=None,
        metadata={
            "help": "Tensor-parallel size of the frozen reference copy (full tuning, --beta above 0), which needs less "
            "memory than the model that trains. Default: as in training, for each of these flags that is left out."
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
        metadata={"help": "Tensor-parallel size of the experts of the frozen reference copy. Default: as in training."},
    )

    sync_check: SyncCheckMode = field(
        default="canary",
        metadata={
            "help": "Proof, after every weight sync, that vLLM runs the trained weights. canary: the names and shapes "
            "that were sent are those of the sync before, and the log-probs of a fixed text agree between trainer and "
            "vLLM as far as rounding goes; the first sync of a run is checked in full. full: a checksum of every "
            "tensor as well. A sync that fails is repeated once, then the run stops and names the tensors that differ. "
            "off: nothing is checked. With --vllm_enable_lora true nothing is checked in full: vLLM must "
            "have a module for each of the adapter's, and the log-probs must agree. Default: canary."
        },
    )
    offload_grad: bool = field(
        default=False,
        metadata={
            "help": "Whether the gradients' buffers may leave the GPU while vLLM generates and log-probs are computed, "
            "beside --offload_model and --offload_optimizer. They hold nothing between steps: they are freed, not "
            "copied. As with those two, nothing leaves while everything fits. Default: false."
        },
    )

    reward_timeout: float | None = field(
        default=None,
        metadata={
            "help": "Seconds that one reward function may take for a rank's share of a rollout. One that takes longer "
            "ends the run with an error that names it. Default: none, --phase_timeout ends the run."
        },
    )
    phase_timeout: float = field(
        default=3600.0,
        metadata={
            "help": "Seconds that one phase of a step (generation, grading, training, ...) or what lies between two "
            "phases (checkpoints, callbacks) may take on any rank. Past it every rank writes its Python stacks and "
            "unfinished collectives to stuck-<time>.txt in --output_dir, and the run ends. 0: no limit. Default: 3600."
        },
    )
    rollout_dump: str | None = field(
        default=None,
        metadata={
            "help": "Folder for every rollout of this run: completions token by token, with their rewards, as lines of "
            "JSON. docs/dump_and_replay.md has the format. Default: none, rollouts are not kept."
        },
    )
    rollout_replay: str | None = field(
        default=None,
        metadata={
            "help": "Folder that --rollout_dump of another run has written: this run trains on those completions and "
            "rewards, starts no vLLM and asks no reward function. Default: none."
        },
    )
    rollout_only: bool = field(
        default=False,
        metadata={
            "help": "Generate, grade and dump (--rollout_dump) the rollouts of this run with the weights as they are, "
            "and train nothing. Default: false."
        },
    )
    vllm_server_api_key: str | None = field(
        default=None,
        metadata={
            "help": "The --api_key of the rollout servers. The environment variable SWIFT_ROLLOUT_API_KEY says the "
            "same, to both ends, and shows up in no list of processes. It is not written to args.json. Default: none."
        },
    )
    vllm_request_timeout: float = field(
        default=3600.0,
        metadata={
            "help": "Seconds within which a rollout server must complete one request, or load new weights; then the "
            "request goes to another one. Longer than the longest completion takes, waiting included, and with several "
            "turns the longest conversation. Default: 3600."
        },
    )
    seed_completions: bool = field(
        default=False,
        metadata={
            "help": "Sample every completion with a seed of its own, which follows from --seed: then completions "
            "depend neither on the server that makes them nor on what else it makes meanwhile, but for rounding. Of "
            "several turns each has its own. "
            "vLLM draws seeded completions one by one, some 10 microseconds each per token on a GPU. Default: false."
        },
    )
    max_staleness: int | None = field(
        default=None,
        metadata={
            "help": "With --async_generate true: how many rollouts generation may be ahead of training. At 1 the next "
            "rollout is generated while one is trained, by weights from before that training. At 0 they take turns, as "
            "without --async_generate. docs/async.md says what becomes of the loss. Default: 1."
        },
    )
