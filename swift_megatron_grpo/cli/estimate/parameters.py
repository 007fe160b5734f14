"""Count the parameters of a rank from the names and shapes of a checkpoint's tensors. Pure Python."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

from swift_megatron_grpo.settings.layout import Layout, layers_of_stages

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# The part of a vision tower that turns its output into rows of the language model, with its own flags.
_ALIGNER = re.compile(r"(?:^|\.)(merger|(deepstack_)?merger_list|multi_modal_projector|mlp1|audio_tower\.proj[12]?)\.")
# Matrices that every tensor-parallel rank has a copy of: routers, and the projections to a latent space.
_COPIED = re.compile(r"\.(gate|shared_expert_gate|router|q_a_proj|kv_a_proj_with_mqa)\.weight$")
# Matrices that Megatron multiplies together with others of the same input, whose adapter has one first matrix for all.
_FUSED = re.compile(r"\.(k_proj|v_proj|up_proj)\.weight$")


class Part(Enum):
    """The part of a model that a tensor belongs to, which determines the ranks that hold it."""

    EMBEDDING = "embedding"
    HEAD = "head"
    EXPERTS = "experts"
    LAYERS = "layers"
    VISION_TOWER = "tower"  # of images or audio


_PARTS = {  # the first pattern that a name has; all others are LAYERS
    Part.VISION_TOWER: re.compile(
        r"(?:^|\.)(visual|vision\w*|audio\w*|multi_modal_projector|merger|mlp1|vit\w*|talker|token2wav)\."
    ),
    Part.EMBEDDING: re.compile(r"(?:^|\.)(embed_tokens|word_embeddings|wte)\."),
    Part.HEAD: re.compile(r"(?:^|\.)(lm_head|output)\.weight$"),
    Part.EXPERTS: re.compile(r"\.experts\."),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    part: Part
    layer: int | None  # of the language model; None: in no layer

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_vision_tower(self) -> bool:
        return self.part is Part.VISION_TOWER

    @property
    def is_audio_part(self) -> bool:
        return self.is_vision_tower and "audio_tower." in self.name

    @property
    def is_aligner(self) -> bool:
        return self.is_vision_tower and bool(_ALIGNER.search(self.name))

    @property
    def is_muons(self) -> bool:
        """True for a matrix that Muon updates where it is the optimizer; a checkpoint may stack those of experts."""
        return self.part is Part.EXPERTS or (len(self.shape) == 2 and self.part not in (Part.EMBEDDING, Part.HEAD))

    @property
    def is_copied(self) -> bool:
        """True if every tensor-parallel rank has all of it."""
        return len(self.shape) < 2 or bool(_COPIED.search(self.name))


@dataclass(frozen=True, slots=True)
class Count:
    """Parameters of one rank. Ranks that share experts are not those that share the other weights."""

    shared: float = 0.0  # in data parallelism, by DP * CP ranks
    experts: float = 0.0

    def __add__(self, other: Count) -> Count:
        return Count(self.shared + other.shared, self.experts + other.experts)

    @property
    def total(self) -> float:
        return self.shared + self.experts


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of the model on one pipeline rank."""

    layers: frozenset[int]
    has_embedding: bool
    has_head: bool


def tensors_of(shapes: Mapping[str, Sequence[int]]) -> list[Tensor]:
    """Assign every tensor to its part, and to its layer of the language model."""
    tensors = []
    for name, shape in shapes.items():
        part = next((part for part, pattern in _PARTS.items() if pattern.search(name)), Part.LAYERS)
        layer = _LAYER.search(name) if part in (Part.LAYERS, Part.EXPERTS) else None
        tensors.append(Tensor(name, tuple(shape), part, int(layer[1]) if layer else None))
    return tensors


def held(tensors: Iterable[Tensor], layout: Layout, stage: Stage, tied: bool) -> Count:
    """Count the parameters of a rank of this stage. `tied`: the last stage has a copy of the embedding."""
    return sum((_held(tensor, layout, stage, tied) for tensor in tensors), Count())


def _held(tensor: Tensor, layout: Layout, stage: Stage, tied: bool) -> Count:
    split = tensor.size if tensor.is_copied else tensor.size / layout.tensor_model_parallel_size
    match tensor.part:
        case Part.EXPERTS:
            ranks = layout.expert_model_parallel_size * layout.expert_tensor_parallel_size
            return Count(experts=tensor.size / ranks) if tensor.layer in stage.layers else Count()
        case Part.LAYERS:
            here = tensor.layer in stage.layers if tensor.layer is not None else stage.has_head  # the last norm
            return Count(split if here else 0)
        case Part.EMBEDDING:
            return Count(split if stage.has_embedding or (tied and stage.has_head) else 0)
        case Part.HEAD:
            return Count(split if stage.has_head and not tied else 0)
        case Part.VISION_TOWER:
            return Count(tensor.size if stage.has_embedding else 0)


def adapters(tensors: Iterable[Tensor], layout: Layout, stage: Stage, rank: int, names: Sequence[str]) -> Count:
    """Count the parameters of LoRA adapters on a rank. `names`: endings of the adapted modules; empty: all of them."""
    total = Count()
    for tensor in tensors:
        if names and not tensor.name.removesuffix(".weight").endswith(tuple(names)):
            continue
        is_linear = len(tensor.shape) == 2 and "embed" not in tensor.name
        if tensor.is_audio_part and tensor.is_aligner and not names:
            continue  # ms-swift looks for matrices in the parts of an aligner, and these are matrices themselves
        if tensor.is_vision_tower and stage.has_embedding and is_linear:
            total += Count(rank * sum(tensor.shape))
        if tensor.layer not in stage.layers or tensor.is_copied:
            continue
        *copies, rows, columns = tensor.shape
        is_first = bool(names) or not _FUSED.search(tensor.name)
        size = prod(copies) * rank * (rows + columns * is_first)
        if tensor.part is Part.EXPERTS:
            total += Count(experts=size / layout.expert_model_parallel_size)
        else:
            total += Count(size / layout.tensor_model_parallel_size)
    return total


def stages_of(layout: Layout, layers: int) -> list[Stage]:
    """Return the layers of every pipeline rank, with all of its virtual stages."""
    pipeline, virtual = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    counts = layers_of_stages(layout, layers)
    starts = [sum(counts[:place]) for place in range(len(counts))]
    held_by = [frozenset(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]
    return [
        Stage(
            frozenset().union(*(held_by[rank + pipeline * place] for place in range(virtual))),
            has_embedding=rank == 0,
            has_head=rank == pipeline - 1,
        )
        for rank in range(pipeline)
    ]
