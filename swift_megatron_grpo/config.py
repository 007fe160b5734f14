"""What each stage needs to know, frozen. configure.py fills these from the arguments; nobody passes `args` on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from swift_megatron_grpo.layout import Layout

BadRewardPolicy = Literal["stop", "drop"]
ScaleRewards = Literal["group", "batch", "none", "gdpo"]
Estimator = Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_plain"]
RatioLevel = Literal["token", "sequence", "sequence_token"]
KlEstimator = Literal["k1", "abs", "k2", "k3"]
SyncCheckMode = Literal["off", "canary", "full"]
CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Sizes that fit together. Made by `resolve`."""

    layout: Layout
    micro_batch_size: int
    global_batch_size: int
    generation_batch_size: int
    steps_per_generation: int
    num_generations: int

    @property
    def data_parallel(self) -> int:
        return self.layout.data_parallel

    @property
    def gradient_accumulation(self) -> int:
        """Micro batches of one optimizer step on each data-parallel rank."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel)

    @property
    def rollout_prompts(self) -> int:
        return self.generation_batch_size // self.num_generations

    @property
    def train_prompts(self) -> int:
        """Whole prompts of one optimizer step, at least one: a step may also end inside a prompt's completions."""
        return max(1, self.global_batch_size // self.num_generations)

    @property
    def prompts_per_dp_group(self) -> float:
        """global_batch_size / num_generations / data parallel size; ms-swift's page wants a whole number."""
        return self.global_batch_size / self.num_generations / self.data_parallel

    @property
    def notes(self) -> tuple[str, ...]:
        """One line if ms-swift's own trainer would refuse these sizes: nobody should learn it when switching back."""
        objection = self._objection_of_ms_swift()
        if objection is None:
            return ()
        here = "ms-swift's own trainer refuses that; this one deals single completions to its ranks and works as set"
        return (f"{objection}. {here}.",)

    def _objection_of_ms_swift(self) -> str | None:
        dp, prompts = self.data_parallel, self.rollout_prompts
        count = f"generation_batch_size ({self.generation_batch_size}) // num_generations ({self.num_generations})"
        if prompts % dp:
            return f"num_rollout_prompt ({prompts}) = {count} is not divisible by dp_size ({dp})"
        per_device = prompts // dp
        if per_device % self.micro_batch_size:
            return (
                f"Per-device rollout prompt count ({per_device}) = ({count}) // dp_size ({dp}) is not divisible by "
                f"micro_batch_size ({self.micro_batch_size})"
            )
        if self.generation_batch_size % self.layout.world_size:
            return (
                f"generation_batch_size ({self.generation_batch_size}) is not divisible by the world size "
                f"({self.layout.world_size})"
            )
        return None


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How completions are sampled. The loss divides logits by the same temperature."""

    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    max_completion_length: int
    stop_words: tuple[str, ...]
    seed: int | None = None  # every completion is sampled with a seed of its own, from this one


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """A vLLM engine inside the training processes."""

    model_dir: str
    model_type: str
    dtype: torch.dtype
    tensor_parallel_size: int
    gpu_memory_utilization: float
    max_model_len: int | None
    max_num_seqs: int
    enforce_eager: bool
    enable_prefix_caching: bool
    disable_cascade_attn: bool
    limit_mm_per_prompt: dict[str, int] | None
    mm_processor_cache_gb: float | None
    engine_kwargs: dict[str, Any]
    sleep_level: int
    seed: int
    lora_rank: int | None = None  # room for an adapter beside the checkpoint; None: adapters are merged into weights


@dataclass(frozen=True, slots=True)
class RemoteTurnsConfig:
    """Completions of several turns that servers lead: what of it this run demands. None: as the server does."""

    asked_by: str  # the flags that ask for several turns
    scheduler: str | None = None
    max_turns: int | None = None
    gym_env: str | None = None


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """vLLM behind one or more `swift rollout` processes."""

    urls: tuple[str, ...]
    group_ports: tuple[int, ...]  # one per server, for the group that weights travel in; 0: any free one
    timeout: float  # seconds until a server that does not answer counts as gone
    request_timeout: float  # seconds for one completion, and for one transfer of weights
    api_key: str | None = field(repr=False)
    bucket_bytes: int
    needed_length: int  # prompt and completion
    model: dict[str, Any]  # of config.json: what must be the same there
    lora_rank: int | None = None  # None: adapters are merged into what is sent
    turns: RemoteTurnsConfig | None = None  # None: completions of one turn


@dataclass(frozen=True, slots=True)
class SyncCheckConfig:
    """The proof, after every weight sync, that the engine runs the trainer's weights."""

    mode: SyncCheckMode
    dtype: torch.dtype  # of the engine's weights
    has_adapter: bool


@dataclass(frozen=True, slots=True)
class MultiTurnConfig:
    """Completions of several turns, led by one of ms-swift's schedulers."""

    scheduler: str  # key of swift.rollout.multi_turns
    max_turns: int | None
    gym_env: str | None  # key of swift.rollout.envs, for rows that name none


@dataclass(frozen=True, slots=True)
class GradingConfig:
    num_generations: int
    reward_names: tuple[str, ...]  # as ms-swift names the functions
    reward_weights: tuple[float, ...]  # one per reward function
    scale_rewards: ScaleRewards
    bad_reward: BadRewardPolicy
    estimator: Estimator = "grpo"
    overlong_filter: bool = False  # truncated completions are compared with the others, but not trained
    max_resample_times: int = 0  # how often new prompts replace groups of equal rewards; 0: --dynamic_sample is off


@dataclass(frozen=True, slots=True)
class SapoConfig:
    tau_pos: float = 1.0
    tau_neg: float = 1.05


@dataclass(frozen=True, slots=True)
class FipoConfig:
    decay_rate: float = 32.0  # half-life, in tokens
    clip_range: float | None = 0.2  # None or 0: the weight is not clipped
    clip_high_only: bool = True
    safety_threshold: float | None = 4.0


@dataclass(frozen=True, slots=True)
class CorrectionConfig:
    """For the difference between the policy that generated, in the engine, and the same policy in the trainer."""

    mode: CorrectionMode | None = None
    threshold: float = 2.0
    log_metrics: bool = False
    mask_delta: float | None = None  # --off_policy_sequence_mask_delta


@dataclass(frozen=True, slots=True)
class LossConfig:
    name: str  # key of training.loss.LOSSES
    epsilon_low: float
    epsilon_high: float
    beta: float  # weight of the KL to the reference; 0 means no reference exists
    temperature: float
    level: RatioLevel = "token"
    delta: float | None = None
    dual_clip: float | None = None
    kl_estimator: KlEstimator = "k3"
    entropy_coef: float = 0.0
    log_entropy: bool = False
    max_completion_length: int | None = None  # what dr_grpo divides by
    real_tau: float = 0.5
    sapo: SapoConfig = SapoConfig()
    fipo: FipoConfig = FipoConfig()
    correction: CorrectionConfig = CorrectionConfig()


@dataclass(frozen=True, slots=True)
class PackingConfig:
    """Token budgets of packed micro batches. None: micro_batch_size completions each."""

    max_tokens: int | None
    infer_max_tokens: int | None  # of forward-only passes; None for this and the next: as in training
    infer_micro_batch_size: int | None  # the same in completions


@dataclass(frozen=True, slots=True)
class ResidencyConfig:
    """What may leave the GPU while vLLM generates."""

    offload_model: bool  # the policy, and the frozen reference outside of its own pass
    offload_optimizer: bool
    offload_grad: bool


@dataclass(frozen=True, slots=True)
class ReferenceConfig:
    """Where the reference policy comes from. Full tuning: a frozen copy; LoRA: the base under the adapter."""

    beta: float
    model_dir: str | None  # weights of the frozen copy, a folder or a hub id; None: the base under the adapter
    layout: Layout | None  # of the frozen copy; None: as in training


@dataclass(frozen=True, slots=True)
class KlConfig:
    """The KL to the reference beyond the loss."""

    in_reward: bool = False  # subtracted from rewards, and no part of the loss
    reward_estimator: KlEstimator = "k1"
    target: float | None = None  # beta follows the KL towards it; None: beta is fixed
    horizon: int = 10000  # completions over which it adapts


@dataclass(frozen=True, slots=True)
class DataConfig:
    seed: int
    shuffle: bool


@dataclass(frozen=True, slots=True)
class CompletionLogConfig:
    enabled: bool
    output_dir: str
    report_to: tuple[str, ...]
    unique_prompts: bool


@dataclass(frozen=True, slots=True)
class RecordingConfig:
    """Rollouts on disk."""

    dump: Path | None = None  # where this run writes its own
    replay: Path | None = None  # where it reads another's, instead of generating and grading
    only: bool = False  # nothing is trained


@dataclass(frozen=True, slots=True)
class DeadlineConfig:
    """In seconds."""

    phase: float = 3600.0  # of a phase of the loop, or between two; 0: none
    reward: float | None = None  # of one reward function; None: as the phase


@dataclass(frozen=True, slots=True)
class GRPOConfig:
    """One run."""

    batch: BatchPlan
    num_iterations: int  # how often each completion is trained
    data: DataConfig
    sampling: SamplingConfig
    vllm: VllmConfig
    sync_check: SyncCheckConfig
    server: ServerConfig | None  # None: vLLM runs in the training processes
    grading: GradingConfig
    packing: PackingConfig
    loss: LossConfig
    reference: ReferenceConfig
    residency: ResidencyConfig
    log: CompletionLogConfig
    seed: int
    kl: KlConfig = KlConfig()
    recording: RecordingConfig = RecordingConfig()
    deadlines: DeadlineConfig = DeadlineConfig()
    turns: MultiTurnConfig | None = None  # in the training processes; None: one turn
    max_staleness: int = 0  # rollouts that generation may be ahead of training; 0: they take turns
    top_entropy_quantile: float = 1.0  # share of a step's tokens, those of the highest entropy, in the policy loss
