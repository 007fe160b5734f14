"""Many tensors as one flat tensor of bytes, and back. For both ends of a transfer, so torch only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch

NamedWeights = Iterable[tuple[str, torch.Tensor]]

_ALIGNMENT = 16  # bytes; of every dtype that weights have


@dataclass(frozen=True, slots=True)
class Entry:
    """Where in a bucket a tensor lies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    entries: tuple[Entry, ...]
    data: torch.Tensor  # [bytes] uint8

    @property
    def header(self) -> dict[str, Any]:
        return {"entries": [asdict(entry) for entry in self.entries]}


def buckets(weights: NamedWeights, nbytes: int, device: torch.device | None = None) -> Iterator[Bucket]:
    """Buckets of at least one tensor and, beyond that, at most so many bytes."""
    waiting: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights:
        if waiting and size + tensor.nbytes > nbytes:
            yield pack(waiting, device)
            waiting, size = [], 0
        waiting.append((name, tensor))
        size += tensor.nbytes
    if waiting:
        yield pack(waiting, device)


def pack(weights: Sequence[tuple[str, torch.Tensor]], device: torch.device | None = None) -> Bucket:
    """A copy: the tensors may change afterwards."""
    entries, end = [], 0
    for name, tensor in weights:
        entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end))
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    data = torch.empty(end, dtype=torch.uint8, device=device or weights[0][1].device)
    for entry, (_, tensor) in zip(entries, weights, strict=True):
        _view(entry, data).copy_(tensor.detach())
    return Bucket(tuple(entries), data)


def unpack(header: dict[str, Any], data: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Views into `data`."""
    entries = [Entry(each["name"], each["dtype"], tuple(each["shape"]), each["offset"]) for each in header["entries"]]
    return [(entry.name, _view(entry, data)) for entry in entries]


def _view(entry: Entry, data: torch.Tensor) -> torch.Tensor:
    return data[entry.offset : entry.offset + entry.nbytes].view(_dtype(entry.dtype)).view(entry.shape)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no dtype of torch")
    return dtype
