"""Estimate the memory of every rank in every phase of a step. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from swift_megatron_grpo.layout import Layout
from swift_megatron_grpo.planning.activations import (
    Decoder,
    Recompute,
    Tokens,
    bytes_of_head,
    bytes_of_layers,
    micro_batches_in_flight,
)
from swift_megatron_grpo.planning.parameters import Count, Stage, Tensor, adapters, held, stages_of

GRADIENT_BYTES = 4  # Megatron's gradient buffers are fp32
BESIDE_BYTES = 0.2e9  # buffers of communication, positions, statistics of norms
OUTSIDE_BYTES = 1.8e9  # CUDA's context, kernels and NCCL, which are not PyTorch's
ASLEEP_BYTES = 1.2e9  # what vLLM keeps while it sleeps: CUDA graphs and buffers


@dataclass(frozen=True, slots=True)
class Training:
    """The settings of a run that determine its memory."""

    layout: Layout
    tokens: Tokens  # of the largest micro batch
    micro_batches: int  # of a step, on one data-parallel rank
    recompute: Recompute = field(default_factory=Recompute)
    lora_rank: int | None = None  # None: all weights are trained
    lora_modules: tuple[str, ...] = ()  # endings of the names of adapted modules; empty: all linear layers
    trains_tower: bool = False
    weight_bytes: int = 2  # of a number
    optimizer_bytes: float = 12  # of a trained parameter: fp32 weight and two moments
    shards_optimizer: bool = True
    optimizer_on_cpu: float = 0.0  # share
    frozen_reference: bool = False  # a copy of the model for --beta > 0
    offload_model: bool = False
    offload_optimizer: bool = False
    offload_grad: bool = False


@dataclass(frozen=True, slots=True)
class Vllm:
    """vLLM in the training processes."""

    utilization: float  # of the GPU's memory, for its weights and its cache
    sleep_level: int


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank."""

    pipeline_rank: int
    weights: float
    gradients: float
    optimizer: float
    reference: float
    activations: float  # of all micro batches that are between forward and backward
    in_backward: float  # logits, or layers that are recomputed
    vllm: float  # while it generates
    vllm_asleep: float
    offloaded: float  # while vLLM generates
    parameters: Count

    @property
    def states(self) -> float:
        """Bytes that training keeps between steps."""
        return self.weights + self.gradients + self.optimizer + self.reference + BESIDE_BYTES

    @property
    def phases(self) -> dict[str, float]:
        """Peak of each phase."""
        return {
            "generation": self.states - self.offloaded + self.vllm + OUTSIDE_BYTES,
            "train": self.states + self.activations + self.in_backward + self.vllm_asleep + OUTSIDE_BYTES,
        }

    @property
    def peak(self) -> float:
        return max(self.phases.values())


def plan_memory(
    tensors: Sequence[Tensor], decoder: Decoder, training: Training, vllm: Vllm | None, gpu_bytes: float
) -> list[RankMemory]:
    """Return the memory of one rank of each pipeline stage. `vllm` is None with servers."""
    layout = training.layout
    stages = stages_of(layout, decoder.layers)
    return [_of_rank(rank, stages[rank], tensors, decoder, training, vllm, gpu_bytes) for rank in range(len(stages))]


def _of_rank(
    rank: int,
    stage: Stage,
    tensors: Sequence[Tensor],
    decoder: Decoder,
    training: Training,
    vllm: Vllm | None,
    gpu_bytes: float,
) -> RankMemory:
    layout = training.layout
    parameters = held(tensors, layout, stage, decoder.tied)
    trained = trained_parameters(tensors, training, stage, decoder.tied)
    adapter = trained if training.lora_rank is not None else Count()
    weights = (parameters.total + adapter.total) * training.weight_bytes
    gradients = trained.total * GRADIENT_BYTES
    optimizer = _optimizer_states(trained, training) * (1 - training.optimizer_on_cpu)
    layers = bytes_of_layers(
        decoder, sorted(stage.layers), training.tokens, layout, training.recompute, training.weight_bytes
    )
    in_flight = micro_batches_in_flight(layout, rank, training.micro_batches)
    head = bytes_of_head(decoder, training.tokens, layout, training.weight_bytes) if stage.has_head else 0.0
    offloaded = sum(
        size
        for size, moves in (
            (weights, training.offload_model),
            (gradients, training.offload_grad),
            (optimizer, training.offload_optimizer),
        )
        if moves and vllm is not None and vllm.sleep_level > 0
    )
    awake = 0.0 if vllm is None else vllm.utilization * gpu_bytes
    asleep = 0.0 if vllm is None else (min(ASLEEP_BYTES, awake) if vllm.sleep_level else awake)
    return RankMemory(
        pipeline_rank=rank,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        reference=parameters.total * training.weight_bytes if training.frozen_reference else 0.0,
        activations=layers.kept * in_flight,
        in_backward=max(head, layers.recomputed),
        vllm=awake,
        vllm_asleep=asleep,
        offloaded=offloaded,
        parameters=parameters,
    )


def trained_parameters(tensors: Sequence[Tensor], training: Training, stage: Stage, tied: bool) -> Count:
    """Count the parameters of a rank that have gradients."""
    if training.lora_rank is not None:
        return adapters(tensors, training.layout, stage, training.lora_rank, training.lora_modules)
    trained = tensors if training.trains_tower else [tensor for tensor in tensors if not tensor.is_tower]
    return held(trained, training.layout, stage, tied)


def _optimizer_states(trained: Count, training: Training) -> float:
    layout = training.layout
    if not training.shards_optimizer:
        return trained.total * training.optimizer_bytes
    of_experts = layout.expert_tensor_parallel_size * layout.expert_model_parallel_size
    sharing = layout.data_parallel * layout.context_parallel_size
    sharing_experts = layout.world_size // (layout.pipeline_model_parallel_size * of_experts)
    return (trained.shared / sharing + trained.experts / max(1, sharing_experts)) * training.optimizer_bytes


def with_budget(training: Training, packed: int) -> Training:
    """Return the same run with micro batches of this many tokens; the step has as many more as it takes."""
    share = packed / training.tokens.packed
    tokens = Tokens(packed, round(training.tokens.keys * share), round(training.tokens.trained * share))
    return replace(training, tokens=tokens, micro_batches=max(1, round(training.micro_batches / share)))
