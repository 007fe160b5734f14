"""Experts that earlier passes have chosen, packed like the tokens of a micro batch, and back.

n: packed tokens, padding included; k: experts of a token. -1: the router chooses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from swift_megatron_grpo.packing.outlines import OutlinedSamples
from swift_megatron_grpo.packing.segments import PackedLayout
from swift_megatron_grpo.types import ExpertRows, Sample

ROUTER_CHOOSES = -1


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """Sizes of a row of experts of one model."""

    num_layers: int
    with_experts: tuple[int, ...]  # layers that have experts, from 0
    experts: int
    k: int


def layers_with_experts(num_layers: int, frequency: int | Sequence[int]) -> tuple[int, ...]:
    """Return the layers that have experts. `frequency`: Megatron's moe_layer_freq, every nth layer or a mask."""
    if isinstance(frequency, int):
        return tuple(range(0, num_layers, frequency))
    return tuple(layer for layer, has_experts in enumerate(frequency) if has_experts)


def routing_shape(samples: Sequence[Sample]) -> tuple[int, int] | None:
    """Return layers and k of the samples with a given routing; None: routers choose for all of them."""
    if isinstance(samples, OutlinedSamples):  # completions with experts do not stay on one rank
        return None
    shapes = {sample.routed_experts.shape[1:] for sample in samples if sample.routed_experts is not None}
    if len(shapes) > 1:
        raise ValueError(f"the routing of samples differs in layers and experts per token: {sorted(shapes)}")
    return next(((layers, k) for layers, k in shapes), None)


def pack_routing(samples: Sequence[Sample], layout: PackedLayout, shape: tuple[int, int]) -> torch.Tensor:
    """Return the given experts, [n, layers, k] int16; shared tokens have those of the first sample that has some."""
    packed = torch.full((layout.total, *shape), ROUTER_CHOOSES, dtype=torch.int16)
    for number, sample in enumerate(samples):
        rows = sample.routed_experts
        if rows is None:
            continue
        if len(rows) > len(sample.tokens):
            raise ValueError(f"a sample of {len(sample.tokens)} tokens has {len(rows)} rows of experts")
        places = layout.places(number)[: len(rows)]
        given = torch.from_numpy(rows.astype(np.int16))
        packed[places] = torch.where(packed[places] == ROUTER_CHOOSES, given, packed[places])
    return packed


def unpack_routing(
    packed: torch.Tensor, layers: Sequence[int], samples: Sequence[Sample], layout: PackedLayout, num_layers: int
) -> list[ExpertRows]:
    """Return the rows of each sample from `packed`, [n, len(layers), k]; -1 in layers that other ranks run."""
    rows: list[ExpertRows] = []
    for number, sample in enumerate(samples):
        whole = np.full((len(sample.tokens), num_layers, packed.shape[2]), ROUTER_CHOOSES, dtype=np.int16)
        whole[:, list(layers)] = packed[layout.places(number)].numpy()
        rows.append(whole)
    return rows
