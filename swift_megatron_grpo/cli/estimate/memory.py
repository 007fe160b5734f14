"""Estimate the memory of every rank in every phase of a step, and what vLLM's share of it holds. Pure Python."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from swift_megatron_grpo.cli.estimate.activations import (
    Decoder,
    MediaTokens,
    Recompute,
    Tokens,
    VisionTower,
    bytes_of_block,
    bytes_of_head,
    bytes_of_layers,
    bytes_of_rows,
    bytes_of_vision_tower,
    micro_batches_in_flight,
)
from swift_megatron_grpo.cli.estimate.audio_part import AudioPart, bytes_at_one_time, bytes_of_audio_part
from swift_megatron_grpo.cli.estimate.parameters import Count, Stage, Tensor, adapters, held, stages_of
from swift_megatron_grpo.settings.layout import Layout

GRADIENT_BYTES = 4  # Megatron's gradient buffers are fp32
BESIDE_BYTES = 0.2e9  # buffers of communication, positions, statistics of norms
OUTSIDE_BYTES = 1.8e9  # CUDA's context, kernels and NCCL, which are not PyTorch's; 0.9 GiB on a single H100 or H200
# The same where NCCL exchanges rows of experts: 4.8 GiB of each of four H200 with all weights of Qwen3-30B-A3B, and
# 5.6 GiB of each of four H100 with Qwen3.5-35B-A3B, whose delta nets have kernels of their own.
OUTSIDE_BYTES_WITH_EXPERTS = 6.0e9
ASLEEP_BYTES = 1.2e9  # what vLLM keeps while it sleeps: CUDA graphs and buffers
_BESIDE_CACHE_BYTES = 2.0e9  # activations of its largest batch, CUDA graphs, sampler: what vLLM's profile takes off
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
    trains_vision_tower: bool = False  # image and audio part without their aligners
    trains_aligner: bool = False
    sees: bool = True  # False: rows have recordings alone, and the image part is frozen
    hears: bool = True  # False: rows have none, and the audio part is frozen
    vision_tower_checkpointing: bool = True  # backward recomputes the blocks of a trained vision tower
    images: MediaTokens = field(default_factory=MediaTokens)
    recordings: MediaTokens = field(default_factory=MediaTokens)  # with those of whole chunks
    weight_bytes: int = 2  # of a number
    optimizer_bytes: float = 12  # of a trained parameter: fp32 weight and two moments
    matrix_bytes: float | None = None  # the same in a matrix that Muon updates; None: there are none
    shards_optimizer: bool = True
    optimizer_on_cpu: float = 0.0  # share
    frozen_reference: bool = False  # a copy of the model for --beta > 0
    trains_draft_head: bool = False  # a layer of multi-token prediction, whose rows pass through the head as well
    teacher_share: float = 0.0  # parameters of a frozen teacher, by those of the model
    graders: int = 0  # bytes of reward models, which every rank has as a whole
    offload_model: bool = False
    offload_optimizer: bool = False
    offload_grad: bool = False

    def trains(self, tensor: Tensor) -> bool:
        if tensor.is_vision_tower and not (self.hears if tensor.is_audio_part else self.sees):
            return False
        return self.adapts(tensor)

    def adapts(self, tensor: Tensor) -> bool:
        """Return True for a tensor that has an adapter in a run with LoRA; not all of them are trained."""
        if tensor.is_aligner:
            return self.trains_aligner
        return self.trains_vision_tower if tensor.is_vision_tower else self.trains_language


@dataclass(frozen=True, slots=True)
class Engine:
    """A vLLM engine in the training processes."""

    weight_bytes: float  # of the whole model
    cache_bytes_per_token: float  # of all layers, on one rank that has all heads
    key_heads: int  # ranks beyond their number keep copies
    longest: int  # tokens of a sequence, at most
    ranks: int  # --vllm_tensor_parallel_size
    utilization: float
    given_cache: float | None = None  # bytes: kv_cache_memory_bytes of --vllm_engine_kwargs
    sleep_level: int = 2  # 0: it stays awake

    @property
    def weights(self) -> float:
        return self.weight_bytes / self.ranks

    @property
    def cache_per_token(self) -> float:
        """Return the bytes of keys and values of a token on one GPU."""
        return self.cache_bytes_per_token / min(self.ranks, self.key_heads)

    def memory(self, gpu_bytes: float) -> float:
        """Return the bytes of one GPU that it takes while it is awake."""
        if self.given_cache is not None:
            return self.weights + self.given_cache + _BESIDE_CACHE_BYTES
        return self.utilization * gpu_bytes

    def cache(self, gpu_bytes: float) -> float:
        """Return the bytes for keys and values on one GPU; negative if the weights do not fit."""
        return self.memory(gpu_bytes) - self.weights - _BESIDE_CACHE_BYTES

    def sequences(self, gpu_bytes: float, length: float) -> int:
        """Return how many sequences of this length the cache holds at one time."""
        of_sequence = self.cache_per_token * length
        return max(0, math.floor(self.cache(gpu_bytes) / of_sequence)) if of_sequence else 0

    def fits(self, gpu_bytes: float) -> bool:
        return self.sequences(gpu_bytes, self.longest) >= 1


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
    outside: float  # of PyTorch
    offloaded: float  # while vLLM generates
    phases: Mapping[str, float]  # peak of each of PHASES

    @property
    def states(self) -> float:
        """Bytes that training keeps between steps."""
        return self.weights + self.gradients + self.optimizer + self.reference + BESIDE_BYTES

    @property
    def peak(self) -> float:
        return max(self.phases.values())


def plan_memory(
    tensors: Sequence[Tensor],
    decoder: Decoder,
    training: Training,
    engine: Engine | None,
    gpu_bytes: float,
    vision_tower: VisionTower | None = None,
    audio_part: AudioPart | None = None,
) -> list[RankMemory]:
    """Return the memory of one rank of each pipeline stage. `engine`: None with servers."""
    layout, item = training.layout, training.weight_bytes
    ranks = []
    sleeps = engine is not None and engine.sleep_level > 0
    awake = 0.0 if engine is None else engine.memory(gpu_bytes)
    asleep = min(ASLEEP_BYTES, awake) if sleeps else awake
    for rank, stage in enumerate(stages_of(layout, decoder.layers)):
        parameters = held(tensors, layout, stage, decoder.tied)
        trained = _trained(tensors, training, stage, decoder.tied)
        adapter = 0.0 if training.lora_rank is None else _adapters(tensors, training, stage, training.lora_rank).total
        weights, gradients = (parameters.total + adapter) * item, trained.total * GRADIENT_BYTES
        optimizer = _optimizer_states(trained, training) * (1 - training.optimizer_on_cpu)
        if training.matrix_bytes is not None:  # every rank has all states of its matrices
            matrices = _trained([tensor for tensor in tensors if tensor.is_muons], training, stage, decoder.tied)
            optimizer -= matrices.total * (training.optimizer_bytes - training.matrix_bytes)
        drafting = training.trains_draft_head and stage.has_head
        numbers = [*sorted(stage.layers), *([decoder.layers] if drafting else [])]
        layers = bytes_of_layers(decoder, numbers, training.tokens, layout, training.recompute, item)
        of_tower, in_block, rows = 0.0, 0.0, 0.0
        if vision_tower is not None and stage.has_embedding:
            of_tower, in_block, rows = _bytes_of_images(vision_tower, training)
        if audio_part is not None and stage.has_embedding:
            of_part, at_one_time, of_recordings = _bytes_of_recordings(audio_part, training)
            of_tower, in_block, rows = of_tower + of_part, max(in_block, at_one_time), rows + of_recordings
        in_flight = micro_batches_in_flight(layout, rank, training.micro_batches)
        head = bytes_of_head(decoder, training.tokens, layout, item) * (1 + drafting) if stage.has_head else 0.0
        returned = weights if sleeps and training.offload_model else 0.0
        dropped = gradients if sleeps and training.offload_grad else 0.0
        moved = optimizer if sleeps and training.offload_optimizer else 0.0
        offloaded = returned + dropped + moved
        reference = parameters.total * item * (training.frozen_reference + training.teacher_share) + training.graders
        activations = (layers.kept + of_tower) * in_flight + rows
        # A vision tower computes before the layers of this micro batch keep something, or after all of it is freed.
        in_backward = max(head, layers.recomputed, in_block - layers.kept)
        outside = OUTSIDE_BYTES if layout.expert_model_parallel_size == 1 else OUTSIDE_BYTES_WITH_EXPERTS
        # A vLLM that sleeps wakes with its weights to get new ones, while the trainer's are back on the GPU.
        syncing = engine.weights + asleep if engine is not None and sleeps else awake
        states = weights + gradients + optimizer + reference + BESIDE_BYTES + outside
        weight_sync, generation = states - offloaded + returned + syncing, states - offloaded + awake
        train = states + activations + in_backward + asleep
        ranks.append(RankMemory(
            pipeline_rank=rank, weights=weights, gradients=gradients, optimizer=optimizer, reference=reference,
            activations=activations, in_backward=in_backward, vllm=awake, outside=outside, offloaded=offloaded,
            phases=dict(zip(PHASES, (weight_sync, generation, train), strict=True)),
        ))  # fmt: skip
    return ranks


def _bytes_of_images(vision_tower: VisionTower, training: Training) -> tuple[float, float, float]:
    """Return what a vision tower keeps for backward of a micro batch, what a block needs at one time, and its rows."""
    images, item = training.images, training.weight_bytes
    trained = training.trains_vision_tower and training.sees, training.trains_aligner and training.sees
    return (
        bytes_of_vision_tower(vision_tower, images.distinct, *trained, training.vision_tower_checkpointing, item),
        bytes_of_block(vision_tower, images.distinct, item),
        bytes_of_rows(vision_tower, images, not any(trained), item),
    )


def _bytes_of_recordings(audio_part: AudioPart, training: Training) -> tuple[float, float, float]:
    """Return the same for an audio part."""
    heard, item = training.recordings, training.weight_bytes
    trained = training.trains_vision_tower and training.hears, training.trains_aligner and training.hears
    return (
        bytes_of_audio_part(audio_part, heard.distinct, *trained, training.vision_tower_checkpointing, item),
        bytes_at_one_time(audio_part, heard.distinct, item),
        0.0 if any(trained) else float(heard.of_rollout * audio_part.rows * item),
    )


def _adapters(tensors: Sequence[Tensor], training: Training, stage: Stage, rank: int) -> Count:
    """Count the parameters of adapters on a rank, also of parts that no row reaches."""
    adapted = [tensor for tensor in tensors if training.adapts(tensor)]
    return adapters(adapted, training.layout, stage, rank, training.lora_modules)


def _trained(tensors: Sequence[Tensor], training: Training, stage: Stage, tied: bool) -> Count:
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
    images, recordings = training.images.scaled(share), training.recordings.scaled(share)
    micro_batches = max(1, round(training.micro_batches / share))
    return replace(training, tokens=tokens, micro_batches=micro_batches, images=images, recordings=recordings)
