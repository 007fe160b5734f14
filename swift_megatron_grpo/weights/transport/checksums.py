"""Checksums of tensors and of slices of them.

An engine fuses, shards and stacks the tensors that it receives. A tensor's checksum is therefore a sum over its
elements, each weighted by its position in the whole tensor: the checksums of its slices, wherever they are, add up to
the tensor's. On a GPU a kernel computes the checksums of many tensors at once (checksum_kernel.py), the same numbers as
`checksum` here, because trainer and engine may be on different devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from swift_megatron_grpo.weights.transport.buckets import contiguous_strides
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
        self._device = next((tensor.device for tensor, _ in slices if tensor.is_cuda), torch.device("cpu"))
        self._on_cpu: dict[int, Slice] = {}  # by index
        self._wide: dict[int, Slice] = {}
        ready: list[tuple[int, torch.Tensor, TensorSlice | None]] = []
        for index, (tensor, part) in enumerate(slices):
            if not tensor.is_cuda:
                self._on_cpu[index] = tensor, part
            elif tensor.element_size() > dtype.itemsize:
                self._wide[index] = tensor, part
            else:
                ready.append((index, tensor, part))
        self._ready = _kernel()(ready) if ready else None

    def sums(self) -> torch.Tensor:
        """Return the checksums, which are numbers modulo 2**64. They stay on the device."""
        sums = torch.zeros(self._number, dtype=torch.int64, device=self._device)
        if self._ready is not None:
            self._ready.add_to(sums)
        for index, (tensor, part) in self._wide.items():
            _kernel()([(index, tensor.to(self._dtype), part)]).add_to(sums)
        for index, total in zip(self._on_cpu, checksums(self._on_cpu.values(), self._dtype), strict=True):
            sums[index] = total
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
    return checksums([(tensor, part)], dtype)[0]


def checksums(slices: Collection[Slice], dtype: torch.dtype) -> list[torch.Tensor]:
    """Compute the checksums of many slices, as `checksum` does.

    Weights of positions are most of the work. Slices that begin at the same position share them.
    """
    totals = [torch.zeros((), dtype=torch.int64, device=tensor.device) for tensor, _ in slices]
    alike = defaultdict[_Grid, list[tuple[torch.Tensor, torch.Tensor]]](list)
    for (tensor, part), total in zip(slices, totals, strict=True):
        if tensor.element_size() > dtype.itemsize:
            tensor = tensor.to(dtype)
        part = part or TensorSlice.whole(tensor.shape)
        if tensor.is_contiguous() and part.strides == contiguous_strides(part.shape):
            tensor = tensor.view(-1)
            part = TensorSlice(part.offset, (part.numel,), (1,))
        if tensor.numel():
            grid = _Grid(part.offset, part.shape[1:], part.strides, tensor.device)
            alike[grid].append((tensor.view(_INTEGER[tensor.element_size()]), total))
    for grid, members in alike.items():
        rows = max(1, _CHUNK // prod(grid.row))
        most = max(len(bits) for bits, _ in members)
        for begin in range(0, most, rows):
            weights = _weight(grid.positions(begin, min(begin + rows, most)))
            for bits, total in members:
                if begin >= len(bits):
                    continue
                values = bits[begin : begin + rows]
                total += (values.to(torch.int64) * weights[: len(values)]).sum()
    return totals


class _Grid(NamedTuple):
    """The positions of a slice with any number of rows: the parts of a tensor along its first dimension."""

    offset: int
    row: tuple[int, ...]  # shape
    strides: tuple[int, ...]
    device: torch.device

    def positions(self, begin: int, end: int) -> torch.Tensor:
        """Return the positions, in the whole tensor, of the elements of these rows."""
        shape = (end - begin, *self.row)
        first = self.offset + begin * self.strides[0]
        positions = torch.full([1] * len(shape), first, dtype=torch.int64, device=self.device)
        for dimension, (length, stride) in enumerate(zip(shape, self.strides, strict=True)):
            steps = [1] * len(shape)
            steps[dimension] = length
            positions = positions + (torch.arange(length, device=self.device) * stride).view(steps)
        return positions


def _weight(positions: torch.Tensor) -> torch.Tensor:
    """Return a pseudo-random odd weight per position: one changed element always changes the sum."""
    mixed = positions * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return (mixed ^ (mixed >> 32)) | 1
