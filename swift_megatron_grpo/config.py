"""What each stage needs to know, frozen. arguments.py fills these from the command line; nobody passes `args` on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from swift_megatron_grpo.batching import BatchPlan

BadRewardPolicy = Literal["stop", "drop"]
ScaleRewards = Literal["group", "batch", "none"]


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How completions are sampled. The loss divides logits by the same temperature."""

    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    max_completion_length: int
    stop_words: tuple[str, ...]


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


@dataclass(frozen=True, slots=True)
class GradingConfig:
    num_generations: int
    reward_names: tuple[str, ...]  # as ms-swift names the functions
    reward_weights: tuple[float, ...]  # one per reward function
    scale_rewards: ScaleRewards
    bad_reward: BadRewardPolicy


@dataclass(frozen=True, slots=True)
class LossConfig:
    name: str  # key of training.loss.LOSSES
    epsilon_low: float
    epsilon_high: float
    beta: float  # weight of the KL to the reference; 0 means no reference exists
    temperature: float


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
class LayoutConfig:
    """How ranks share a model."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int


@dataclass(frozen=True, slots=True)
class ReferenceConfig:
    """Where the reference policy comes from. Full tuning: a frozen copy; LoRA: the base under the adapter."""

    beta: float
    model_dir: str | None  # weights of the frozen copy, a folder or a hub id; None: the base under the adapter
    layout: LayoutConfig | None  # of the frozen copy; None: as in training


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
class GRPOConfig:
    """One run."""

    batch: BatchPlan
    num_iterations: int  # how often each completion is trained
    data: DataConfig
    sampling: SamplingConfig
    vllm: VllmConfig
    grading: GradingConfig
    packing: PackingConfig
    loss: LossConfig
    reference: ReferenceConfig
    residency: ResidencyConfig
    log: CompletionLogConfig
    seed: int
