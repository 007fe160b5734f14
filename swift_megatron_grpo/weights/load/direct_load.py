"""Writes sent tensors into the places of vLLM's parameters that an earlier load has shown.

vLLM's loaders look up each tensor by its name in Python, some 0.1 ms a tensor. The 18,867 tensors of Qwen3-30B-A3B,
three for each expert, take longer there than on the wire. Copies to known places start together instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from swift_megatron_grpo.weights.transport.buckets import NamedWeights, copy_all
from swift_megatron_grpo.weights.transport.held_weights import TensorSlice

BATCH_BYTES = 2**28  # of tensors that wait to be copied together


class Destination(Protocol):
    """A part of a parameter that holds a slice of a sent tensor."""

    @property
    def piece(self) -> TensorSlice: ...

    @property
    def view(self) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class FixedDestination:
    """A part of a parameter that keeps its place."""

    piece: TensorSlice
    view: torch.Tensor


def write_directly(
    weights: NamedWeights,
    destinations: Mapping[str, Sequence[Destination]],
    complete_with: Callable[[str], Sequence[str]],
    quantize: Callable[[str], None],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Copy each tensor to its destinations, and yield those that have none. Consume the iterator to its end.

    `complete_with`: returns the layers that are complete once this tensor is in its places; they are quantized then.
    """
    views: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    waiting = 0
    for name, tensor in weights:
        if name not in destinations:
            yield name, tensor
            continue
        for destination in destinations[name]:
            views.append(destination.view)
            sources.append(_slice_of(tensor, destination.piece))
        waiting += tensor.nbytes
        complete = complete_with(name)
        if complete or waiting >= BATCH_BYTES:
            copy_all(views, sources)
            views, sources, waiting = [], [], 0
        for layer in complete:
            quantize(layer)
    copy_all(views, sources)


def _slice_of(tensor: torch.Tensor, piece: TensorSlice) -> torch.Tensor:
    if piece.offset == 0 and piece.shape == tensor.shape:
        return tensor
    whole = tensor.contiguous()
    return whole.as_strided(piece.shape, piece.strides, int(whole.storage_offset()) + piece.offset)
