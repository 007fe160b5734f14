"""The layers of a model that have experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """Sizes of a row of experts of this model."""

    num_layers: int
    with_experts: tuple[int, ...]  # from 0
    experts: int
    k: int  # experts of a token


def layers_with_experts(num_layers: int, frequency: int | Sequence[int]) -> tuple[int, ...]:
    """Return the layers that have experts. `frequency`: Megatron's moe_layer_freq, every nth layer or a mask."""
    if isinstance(frequency, int):
        return tuple(range(0, num_layers, frequency))
    return tuple(layer for layer, has_experts in enumerate(frequency) if has_experts)
