"""Checksums of the tensors that an inference engine holds, in terms that engine and trainer share.

The engine's side reads its model, and the trainer's side compares the result with the tensors that it sent. An engine
fuses, shards and stacks the tensors that it receives. A tensor's checksum is therefore a sum over its elements, each
weighted by its position in the whole tensor: the checksums of its slices, wherever they are, add up to the tensor's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from swift_megatron_grpo.weights.transport.buckets import contiguous_strides

_CHUNK = 2**22  # elements processed at a time: their products with positions take 8 bytes each
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorSlice(NamedTuple):
    """A slice of a tensor: the positions of its elements in the whole tensor, which is counted row by row."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> TensorSlice:
        """Return the slice that is the whole tensor."""
        return cls(0, tuple(shape), contiguous_strides(shape))

    @property
    def numel(self) -> int:
        return prod(self.shape)


class HeldSlice(NamedTuple):
    """A slice of a tensor that an engine holds, and its checksum."""

    slice: TensorSlice
    checksum: int


@dataclass(frozen=True)
class WorkerWeights:
    """Weights that one worker's model holds, by the names under which they were sent. Strings and numbers only."""

    engine: str  # the same for all workers of an engine
    held: dict[str, tuple[HeldSlice, ...]]
    ignored: tuple[str, ...]  # tensors that were sent, but not used by this worker's model
    unwritten: tuple[str, ...]  # parameters, by the model's names, that no sent tensor has written completely
    unreadable: tuple[str, ...]  # tensors that are not held as they were sent: repacked for a kernel

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_json(cls, message: dict[str, Any]) -> WorkerWeights:
        """Return the weights that `to_json` has encoded."""
        held = {
            name: tuple(
                HeldSlice(TensorSlice(offset, tuple(shape), tuple(strides)), value)
                for (offset, shape, strides), value in slices
            )
            for name, slices in message["held"].items()
        }
        lists = (tuple(message[name]) for name in ("ignored", "unwritten", "unreadable"))
        return cls(message["engine"], held, *lists)


def checksum(tensor: torch.Tensor, dtype: torch.dtype, part: TensorSlice | None = None) -> torch.Tensor:
    """Compute the checksum of the elements' bits, converted to `dtype` if their type is wider.

    `part`: the slice that `tensor` is; None: it is whole. The result stays on the device: see `to_integers`.
    """
    part = part or TensorSlice.whole(tensor.shape)
    if tensor.element_size() > dtype.itemsize:
        tensor = tensor.to(dtype)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for values, positions in _chunks(tensor, part):
        bits = values.contiguous().view(_INTEGER[values.element_size()])
        total += (bits.to(torch.int64) * _weight(positions)).sum()
    return total


def to_integers(checksums: Iterable[torch.Tensor]) -> list[int]:
    """Return checksums as integers, with one transfer from the device."""
    on_device = list(checksums)
    return [value % 2**64 for value in torch.stack(on_device).tolist()] if on_device else []


def _chunks(tensor: torch.Tensor, part: TensorSlice) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield rows of the tensor, with the positions of their elements in the whole tensor."""
    if tensor.ndim == 0:
        tensor = tensor.view(1)
        part = TensorSlice(part.offset, (1,), (1,))
    rows = max(1, _CHUNK * tensor.shape[0] // max(tensor.numel(), 1))
    for begin in range(0, tensor.shape[0], rows):
        values = tensor[begin : begin + rows]
        positions = torch.full((), part.offset + begin * part.strides[0], dtype=torch.int64, device=tensor.device)
        for dimension, (length, stride) in enumerate(zip(values.shape, part.strides, strict=True)):
            shape = [1] * values.ndim
            shape[dimension] = length
            positions = positions + (torch.arange(length, device=tensor.device) * stride).view(shape)
        yield values, positions


def _weight(positions: torch.Tensor) -> torch.Tensor:
    """Return a pseudo-random odd weight per position: one changed element always changes the sum."""
    mixed = positions * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return (mixed ^ (mixed >> 32)) | 1
