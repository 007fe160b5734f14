"""Estimate the memory of every rank in every phase of a step. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from swift_megatron_grpo.cli.estimate.activations import (
    Decoder,
    Recompute,
    Tokens,
    bytes_of_head,
    bytes_of_layers,
    micro_batches_in_flight,
)
from swift_megatron_grpo.cli.estimate.engine import Engine
from swift_megatron_grpo.cli.estimate.parameters import Count, Stage, Tensor, adapters, held, stages_of
from swift_megatron_grpo.cli.estimate.vision_tower import (
    ImageTokens,
    VisionTower,
    bytes_of_block,
    bytes_of_rows,
    bytes_of_vision_tower,
)
from swift_megatron_grpo.settings.layout import Layout

GRADIENT_BYTES = 4  # Megatron's gradient buffers are fp32
BESIDE_BYTES = 0.2e9  # buffers of communication, positions, statistics of norms
OUTSIDE_BYTES = 1.8e9  # CUDA's context, kernels and NCCL, which are not PyTorch's; 0.9 GiB on a single H100 or H200
# The same where NCCL exchanges rows of experts: 4.8 GiB of each of four H200 with all weights of Qwen3-30B-A3B, and
# 5.6 GiB of each of four H100 with Qwen3.5-35B-A3B, whose delta nets have kernels of their own.
OUTSIDE_BYTES_WITH_EXPERTS = 6.0e9
ASLEEP_BYTES = 1.2e9  # what vLLM keeps while it sleeps: CUDA graphs and buffers
PHASES = ("weight sync", "generation", "train")


@dataclass(frozen=True, slots=True)
class Training:
    """The settings of a run that determine its memory."""

    layout: Layout
    tokens: Tokens  # of the largest micro batch
    micro_batches: int  # of a step, on one data-parallel rank
    recompute: Recompute = field(default_factory=Recompute)
    lora_rank: int | None = None  # None: all weights are trained
    lora_modules: tuple[str, ...] = ()  # endings of the names of adapted modules; empty: all linear layers
    trains_language: bool = True
    trains_vision_tower: bool = False  # the image part without its aligner
    trains_aligner: bool = False
    vision_tower_checkpointing: bool = True  # backward recomputes the blocks of a trained vision tower
    images: ImageTokens = field(default_factory=ImageTokens)
    weight_bytes: int = 2  # of a number
    optimizer_bytes: float = 12  # of a trained parameter: fp32 weight and two moments
    shards_optimizer: bool = True
    optimizer_on_cpu: float = 0.0  # share
    frozen_reference: bool = False  # a copy of the model for --beta > 0
    offload_model: bool = False
    offload_optimizer: bool = False
    offload_grad: bool = False

    def trains(self, tensor: Tensor) -> bool:
        if tensor.is_aligner:
            return self.trains_aligner
        return self.trains_vision_tower if tensor.is_vision_tower else self.trains_language


@dataclass(frozen=True, slots=True)
class Vllm:
    """vLLM in the training processes."""

    engine: Engine
    sleep_level: int


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank."""

    pipeline_rank: int
    weights: float
    gradients: float
    optimizer: float
    reference: float
    activations: float  # of all micro batches that are between forward and backward, and rows of images
    in_backward: float  # logits, or layers that are recomputed
    vllm: float  # while it generates
    vllm_asleep: float
    vllm_syncing: float  # what it keeps while it sleeps, and its weights; if it stays awake, all of it
    outside: float  # of PyTorch
    offloaded: float  # while vLLM generates
    returned: float  # of what is offloaded, the weights, while they are sent to vLLM
    parameters: Count

    @property
    def states(self) -> float:
        """Bytes that training keeps between steps."""
        return self.weights + self.gradients + self.optimizer + self.reference + BESIDE_BYTES

    @property
    def phases(self) -> dict[str, float]:
        """Peak of each of PHASES."""
        weight_sync = self.states - self.offloaded + self.returned + self.vllm_syncing
        generation = self.states - self.offloaded + self.vllm
        train = self.states + self.activations + self.in_backward + self.vllm_asleep
        return {
            phase: used + self.outside for phase, used in zip(PHASES, (weight_sync, generation, train), strict=True)
        }

    @property
    def peak(self) -> float:
        return max(self.phases.values())


def plan_memory(
    tensors: Sequence[Tensor],
    decoder: Decoder,
    training: Training,
    vllm: Vllm | None,
    gpu_bytes: float,
    vision_tower: VisionTower | None = None,
) -> list[RankMemory]:
    """Return the memory of one rank of each pipeline stage. `vllm`: None with servers."""
    layout = training.layout
    stages = stages_of(layout, decoder.layers)
    return [
        _of_rank(rank, stages[rank], tensors, decoder, training, vllm, gpu_bytes, vision_tower)
        for rank in range(len(stages))
    ]


def _of_rank(
    rank: int,
    stage: Stage,
    tensors: Sequence[Tensor],
    decoder: Decoder,
    training: Training,
    vllm: Vllm | None,
    gpu_bytes: float,
    vision_tower: VisionTower | None,
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
    seen = (
        _vision_tower_bytes(vision_tower, training)
        if vision_tower is not None and stage.has_embedding
        else _VisionTowerBytes()
    )
    head = bytes_of_head(decoder, training.tokens, layout, training.weight_bytes) if stage.has_head else 0.0
    sleeps = vllm is not None and vllm.sleep_level > 0
    returned = weights if sleeps and training.offload_model else 0.0
    dropped = gradients if sleeps and training.offload_grad else 0.0
    moved = optimizer if sleeps and training.offload_optimizer else 0.0
    awake = 0.0 if vllm is None else vllm.engine.memory(gpu_bytes)
    asleep = 0.0 if vllm is None else (min(ASLEEP_BYTES, awake) if vllm.sleep_level else awake)
    return RankMemory(
        pipeline_rank=rank,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        reference=parameters.total * training.weight_bytes if training.frozen_reference else 0.0,
        activations=(layers.kept + seen.kept) * in_flight + seen.rows,
        # A vision tower computes when the layers of this micro batch have nothing kept yet, or nothing any more.
        in_backward=max(head, layers.recomputed, seen.in_block - layers.kept),
        vllm=awake,
        vllm_asleep=asleep,
        vllm_syncing=0.0 if vllm is None else (vllm.engine.weights() + asleep if sleeps else awake),
        outside=OUTSIDE_BYTES if layout.expert_model_parallel_size == 1 else OUTSIDE_BYTES_WITH_EXPERTS,
        offloaded=returned + dropped + moved,
        returned=returned,
        parameters=parameters,
    )


@dataclass(frozen=True, slots=True)
class _VisionTowerBytes:
    """Bytes of an image part on a rank of the first stage."""

    kept: float = 0.0  # from forward to backward of a micro batch
    in_block: float = 0.0  # at one time, in its own forward or backward
    rows: float = 0.0


def _vision_tower_bytes(vision_tower: VisionTower, training: Training) -> _VisionTowerBytes:
    images, item = training.images, training.weight_bytes
    trained = training.trains_vision_tower, training.trains_aligner
    return _VisionTowerBytes(
        kept=bytes_of_vision_tower(vision_tower, images.distinct, *trained, training.vision_tower_checkpointing, item),
        in_block=bytes_of_block(vision_tower, images.distinct, item),
        rows=bytes_of_rows(vision_tower, images, not any(trained), item),
    )


def trained_parameters(tensors: Sequence[Tensor], training: Training, stage: Stage, tied: bool) -> Count:
    """Count the parameters of a rank that have gradients."""
    trained = [tensor for tensor in tensors if training.trains(tensor)]
    if training.lora_rank is not None:
        return adapters(trained, training.layout, stage, training.lora_rank, training.lora_modules)
    return held(trained, training.layout, stage, tied)


def _optimizer_states(trained: Count, training: Training) -> float:
    layout = training.layout
    if not training.shards_optimizer:
        return trained.total * training.optimizer_bytes
    of_experts = layout.expert_tensor_parallel_size * layout.expert_model_parallel_size
    sharing = layout.data_parallel * layout.context_parallel_size
    sharing_experts = layout.world_size // (layout.pipeline_model_parallel_size * of_experts)
    return (trained.shared / sharing + trained.experts / max(1, sharing_experts)) * training.optimizer_bytes


def master_bytes(main_params: int, precision_aware: bool, bf16: bool) -> int:
    """Return the bytes of a trained parameter's master, which `main_params` would take by itself.

    Next to a bf16 weight, the precision-aware optimizer keeps only the lower half of a master in fp32.
    """
    return 2 if precision_aware and bf16 and main_params == 4 else main_params


def with_budget(training: Training, packed: int) -> Training:
    """Return the same run with micro batches of this many tokens; the step has as many more as it takes."""
    share = packed / training.tokens.packed
    tokens = Tokens(packed, round(training.tokens.keys * share), round(training.tokens.trained * share))
    shown = training.images
    images = replace(shown, shown=round(shown.shown * share), distinct=round(shown.distinct * share))
    micro_batches = max(1, round(training.micro_batches / share))
    return replace(training, tokens=tokens, micro_batches=micro_batches, images=images)
