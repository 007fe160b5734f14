"""Frozen settings of every stage. arguments/to_config.py fills them; `args` is not passed beyond that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from swift_megatron_grpo.settings import algorithm, batches, flag, losses, run, time_limits, trained
from swift_megatron_grpo.settings.adapter import Adapter
from swift_megatron_grpo.settings.chord import Chord
from swift_megatron_grpo.settings.recording import CompletionLogging, Recording
from swift_megatron_grpo.settings.reference import Reference
from swift_megatron_grpo.settings.rewards import BadRewardPolicy
from swift_megatron_grpo.settings.routing import Routing
from swift_megatron_grpo.settings.servers import Engine, RemoteTurnsConfig
from swift_megatron_grpo.settings.teacher import Teacher
from swift_megatron_grpo.types import Quantization


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Sampling of completions. The loss divides logits by the same temperature."""

    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    max_completion_length: int
    stop_words: tuple[str, ...]
    seed: int | None = None  # every completion has its own seed, derived from this one; None: no seeds
    regex: str | None = None  # that completions match; None: sampled freely
    limits_conversations: bool = False  # max_completion_length is for all turns of a conversation together
    min_p: float = 0.0  # share of the largest probability, below which tokens are not sampled
    logprobs: bool = True  # completions come with the log-probs of their tokens


class VllmConfig(Engine):
    """The flags of the engine, complete, and what else vLLM in the training processes depends on."""

    model_dir: str
    model_type: str
    torch_dtype: torch.dtype
    seed: int
    vllm_max_num_seqs: int
    vllm_engine_kwargs: dict[str, Any]
    rollout_quantization: Quantization = "none"
    lora_rank: int | None = None  # rank of the adapter slot; None: adapters are merged into the weights
    base_differs: bool = False  # from `model_dir`: the weights below an adapter in its slot
    hf_overrides: dict[str, Any] = field(default_factory=dict)  # values of config.json that this run changes
    returns_experts: bool = False  # the engine reports which experts its routers choose
    has_experts: bool = False
    drafts: int = 0  # the most of a request in a step
    predicts_drafts: bool = False  # by the model's own layers of multi-token prediction


CANARY_TOKENS = 128  # at most, of the text that verifies weight syncs


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """vLLM behind one or more `swift rollout` processes."""

    urls: tuple[str, ...]
    group_ports: tuple[int, ...]  # one per server, for the group that transfers weights; 0: any free port
    timeout: float  # seconds until a server that does not respond counts as lost
    request_timeout: float  # seconds for one completion, and for one transfer of weights
    api_key: str | None = field(repr=False)
    bucket_bytes: int
    needed_length: int  # tokens of the longest prompt and the longest completion
    model: dict[str, Any]  # values of config.json that must be equal on the server
    lora_rank: int | None = None  # None: adapters are merged into the weights that are sent
    turns: RemoteTurnsConfig | None = None  # None: completions of one turn
    limits_conversations: bool = False  # --completion_length_limit_scope total
    images: int = 0  # the most in a row of the datasets
    recordings: int = 0  # the most in a row
    videos: int = 0  # the most in a row
    returns_experts: bool = False  # this run requests which experts the servers' routers choose
    quantization: Quantization = "none"  # that the servers must have as well
    batch_invariant: bool = False  # likewise
    drafts: int = 0  # likewise: the most of a request in a step
    updates_in_flight: bool = False  # weights are sent to servers that generate, which continue with them

    @property
    def least_length(self) -> int:
        """The tokens for which every server must have room: the canary's, and one that is sampled."""
        return min(self.needed_length, CANARY_TOKENS + 1)


@dataclass(frozen=True, slots=True)
class MultiTurnConfig:
    """Conversations of several turns, conducted by one of ms-swift's schedulers in the training processes."""

    scheduler: str  # key of swift.rollout.multi_turns
    max_turns: int | None
    gym_env: str | None  # key of swift.rollout.envs, for rows that name no environment


class GradingConfig(flag.Flags):
    num_generations: int
    reward_names: tuple[str, ...]  # those of --reward_funcs, each of them once
    reward_weights: tuple[float, ...]  # one per reward function
    scale_rewards: algorithm.ScaleRewards
    bad_reward: BadRewardPolicy
    advantage_estimator: str = "grpo"
    overlong_filter: bool = False  # truncated completions count in baselines but are not trained
    max_resample_times: int = 0  # rounds that replace groups of equal rewards; 0: --dynamic_sample is off
    spare_groups: int | None = 0  # generated with a rollout for these rounds; None: as many as earlier rollouts needed


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    sampling: SamplingConfig  # with a seed
    num_generations: int
    prompts_at_once: int
    most_prompts: int | None  # of each dataset; None: all
    before_training: bool
    correct_reward: int  # place of the reward function that decides if a completion is correct
    correct_from: float  # its value from which a completion is correct
    names: dict[str, str]  # of the datasets, by the path or hub id in their rows; empty: they count as one


@dataclass(frozen=True, slots=True)
class SavedParts:
    """The parts of a checkpoint, which determine its size."""

    adapter_only: bool
    copies: int  # of the trained weights: in Megatron's format, in that of transformers
    merged_copies: int  # of all weights, with the adapter merged in
    whole_models: int  # of these copies, those with the checkpoint's untrained tensors
    optimizer_bytes: int  # for each trained weight


class GRPOConfig(flag.Flags):
    """All settings of one run: classes of flags, as their stages read them, and what follows from several."""

    num_iterations: int  # number of times each completion is trained
    top_entropy_quantile: float  # share of tokens, of the highest entropy, in the policy loss
    rollout_logprobs_interval: int  # loop/rollout_queue.py
    data: run.Data
    adapter: Adapter
    micro_batches: batches.MicroBatches
    offloading: trained.Offloading
    log: CompletionLogging
    kl: losses.Kl
    loss: losses.LossConfig
    chord: Chord
    reference: Reference
    teacher: Teacher
    deadlines: time_limits.TimeLimits
    routing: Routing
    batch: batches.BatchSizes
    sampling: SamplingConfig
    engine: VllmConfig
    server: ServerConfig | None  # None: vLLM runs in the training processes
    grading: GradingConfig
    evaluation: EvaluationConfig
    vision_tower_share: float  # share of the work of a trained vision tower that a training pass has
    saved: SavedParts
    recording: Recording
    typed: tuple[tuple[str, str], ...]  # the flags that decide what a run generates and trains
    vocabulary: int  # rows of the model's embedding, which bound the tokens of a replay
    turns: MultiTurnConfig | None  # conversations in the training processes; None: single turns
    max_staleness: int  # rollouts that generation may be ahead of training; 0: the two alternate
    in_flight_weight_updates: bool  # an engine is sent newer weights while it generates
    trace_steps: tuple[int, int] | None  # first and last; None: no trace
