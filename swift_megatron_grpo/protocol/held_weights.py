"""What an inference engine holds of the tensors that it was sent: the words that the engine's side, which reads its
model, and the trainer's side, which knows what it sent, share.

An engine fuses, cuts and stacks what it is sent. So a tensor's checksum is a sum over its elements, each counted with
its place in the whole tensor: the checksums of pieces, wherever they are, add up to that of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_CHUNK = 2**22  # elements looked at in one go: their products with places are 8 bytes each
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 2**64


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A piece of a tensor: at which places, in the order of its rows, of the whole tensor the elements lie."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> TensorSlice:
        strides, size = [], 1
        for length in reversed(shape):
            strides.append(size)
            size *= length
        return cls(0, tuple(shape), tuple(reversed(strides)))

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class HeldSlice:
    """A piece of a tensor that an engine holds, and the checksum of what is there."""

    piece: TensorSlice
    checksum: int


@dataclass(frozen=True, slots=True)
class WorkerWeights:
    """What one worker's model holds, by the names under which it was sent. Nothing but strings and numbers."""

    engine: str  # workers of one engine name the same
    held: dict[str, tuple[HeldSlice, ...]]
    ignored: tuple[str, ...]  # were sent, and this worker's model took nothing of them
    # parameters of the model, by its own names, that nothing sent has written, or not all of
    unwritten: tuple[str, ...]
    unreadable: tuple[str, ...]  # were taken, but are not held as they were sent: repacked for a kernel

    def to_json(self) -> dict[str, Any]:
        held = {
            name: [[each.piece.offset, each.piece.shape, each.piece.strides, each.checksum] for each in pieces]
            for name, pieces in self.held.items()
        }
        lists = {"ignored": self.ignored, "unwritten": self.unwritten, "unreadable": self.unreadable}
        return {"engine": self.engine, "held": held, **{name: list(names) for name, names in lists.items()}}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> WorkerWeights:
        held = {
            name: tuple(
                HeldSlice(TensorSlice(offset, tuple(shape), tuple(strides)), value)
                for offset, shape, strides, value in rows
            )
            for name, rows in told["held"].items()
        }
        return cls(told["engine"], held, tuple(told["ignored"]), tuple(told["unwritten"]), tuple(told["unreadable"]))


def checksum(tensor: torch.Tensor, dtype: torch.dtype, piece: TensorSlice | None = None) -> torch.Tensor:
    """Of the bits of the elements, in `dtype` if theirs is wider. `piece`: what `tensor` is of a whole one; None: it is
    whole. Stays on its device: see `to_integers`."""
    piece = piece or TensorSlice.whole(tensor.shape)
    if tensor.element_size() > dtype.itemsize:
        tensor = tensor.to(dtype)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for values, places in _chunks(tensor, piece):
        bits = values.contiguous().view(_INTEGER[values.element_size()])
        total += (bits.to(torch.int64) * _weight(places)).sum()
    return total


def to_integers(checksums: Iterable[torch.Tensor]) -> list[int]:
    """As numbers, in one transfer."""
    found = list(checksums)
    return [value % _MODULUS for value in torch.stack(found).tolist()] if found else []


def _chunks(tensor: torch.Tensor, piece: TensorSlice) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of the tensor with the places of their elements."""
    if tensor.ndim == 0:
        tensor, piece = tensor.view(1), TensorSlice(piece.offset, (1,), (1,))
    rows = max(1, _CHUNK * tensor.shape[0] // max(tensor.numel(), 1))
    for begin in range(0, tensor.shape[0], rows):
        values = tensor[begin : begin + rows]
        places = torch.full((), piece.offset + begin * piece.strides[0], dtype=torch.int64, device=tensor.device)
        for dimension, (length, stride) in enumerate(zip(values.shape, piece.strides, strict=True)):
            shape = [1] * values.ndim
            shape[dimension] = length
            places = places + (torch.arange(length, device=tensor.device) * stride).view(shape)
        yield values, places


def _weight(places: torch.Tensor) -> torch.Tensor:
    """An odd number that looks random, so that one changed element always shows, and several do not cancel out."""
    mixed = places * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return (mixed ^ (mixed >> 32)) | 1
