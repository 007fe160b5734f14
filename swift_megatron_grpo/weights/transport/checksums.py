"""Checksums of tensors and of slices of them.

An engine fuses, shards and stacks the tensors that it receives. A tensor's checksum is therefore a sum over its
elements, each weighted by its position in the whole tensor: the checksums of its slices, wherever they are, add up to
the tensor's. On a GPU a kernel computes the checksums of many tensors at once (checksum_kernel.py), the same numbers as
`checksum` here, because trainer and engine may be on different devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import TYPE_CHECKING

import torch

from swift_megatron_grpo.weights.transport.held_weights import TensorSlice

if TYPE_CHECKING:
    from swift_megatron_grpo.weights.transport.checksum_kernel import Sums

Slice = tuple[torch.Tensor, TensorSlice | None]  # elements, and the slice of a sent tensor that they are; None: whole

_CHUNK = 2**17  # elements processed at a time: their products with positions, of 8 bytes each, stay in the cache
# Of tensors that wait for a launch. Buckets and copies, for which the same tensors wait, are larger.
_WAITING_BYTES = 2**26
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Batch:
    """Slices whose checksums are computed together, and again whenever their memory has been written to.

    It does not keep the memory of those that the kernel reads.
    """

    def __init__(self, slices: Sequence[Slice], dtype: torch.dtype) -> None:
        """`dtype`: of the run; slices of wider types are converted to it, one after the other."""
        self._dtype = dtype
        self._number = len(slices)
        self._device = slices[0][0].device if slices else torch.device("cpu")
        numbered = [(index, *part) for index, part in enumerate(slices)]
        is_ready = [tensor.is_cuda and tensor.element_size() <= dtype.itemsize for tensor, _ in slices]
        self._others = [part for part, ready in zip(numbered, is_ready, strict=True) if not ready]
        self._ready = _kernel()(compress(numbered, is_ready)) if any(is_ready) else None

    def sums(self) -> torch.Tensor:
        """Return the checksums, which are numbers modulo 2**64. They stay on the device."""
        sums = torch.zeros(self._number, dtype=torch.int64, device=self._device)
        if self._ready is not None:
            self._ready.add_to(sums)
        for index, tensor, part in self._others:
            if tensor.is_cuda:
                _kernel()([(index, tensor.to(self._dtype), part)]).add_to(sums)
            else:
                sums[index] = checksum(tensor, self._dtype, part)
        return sums


def _kernel() -> type[Sums]:
    """Return the class of the kernel. Triton takes long to import, and a machine without a GPU has no use for it."""
    from swift_megatron_grpo.weights.transport.checksum_kernel import Sums

    return Sums


class Checksums:
    """Checksums of tensors that are there for a moment only. `dtype`: as in `Batch`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._waiting: list[Slice] = []
        self._waiting_bytes = 0
        self._sums: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor, part: TensorSlice | None = None) -> None:
        """Add a tensor whose memory is not written to before the next ones are added. `part`: None if it is whole."""
        self._waiting.append((tensor, part))
        self._waiting_bytes += tensor.nbytes
        if self._waiting_bytes >= _WAITING_BYTES:
            self.launch()

    def launch(self) -> None:
        """Read all tensors that were added."""
        if self._waiting:
            self._sums.append(Batch(self._waiting, self._dtype).sums())
            self._waiting = []
            self._waiting_bytes = 0

    def integers(self) -> list[int]:
        """Return the checksums in the order in which tensors were added, with one transfer from the device."""
        self.launch()
        return to_integers(torch.cat(self._sums)) if self._sums else []


def to_integers(sums: torch.Tensor) -> list[int]:
    return [value % 2**64 for value in sums.tolist()]


def checksum(tensor: torch.Tensor, dtype: torch.dtype, part: TensorSlice | None = None) -> torch.Tensor:
    """Compute the checksum of the elements' bits, converted to `dtype` if their type is wider.

    `part`: the slice that `tensor` is; None: it is whole. The result stays on the device.
    """
    part = part or TensorSlice.whole(tensor.shape)
    if tensor.element_size() > dtype.itemsize:
        tensor = tensor.to(dtype)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for values, positions in _chunks(tensor, part):
        bits = values.contiguous().view(_INTEGER[values.element_size()])
        total += (bits.to(torch.int64) * _weight(positions)).sum()
    return total


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
