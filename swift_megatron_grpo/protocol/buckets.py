"""Packs many tensors into one flat tensor of bytes, and unpacks them. Both ends use it, so it imports torch only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import prod
from typing import Any

import torch

NamedWeights = Iterable[tuple[str, torch.Tensor]]

_ALIGNMENT = 16  # bytes; suits every dtype of weights


@dataclass(frozen=True, slots=True)
class Entry:
    """Name, type and location of a tensor in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Packed tensors."""

    entries: tuple[Entry, ...]
    data: torch.Tensor  # [bytes] uint8

    @property
    def header(self) -> dict[str, Any]:
        """The entries in JSON types, which `unpack` needs."""
        return {"entries": [asdict(entry) for entry in self.entries]}


def buckets(weights: NamedWeights, nbytes: int, device: torch.device | None = None) -> Iterator[Bucket]:
    """Pack tensors into buckets of at most `nbytes` bytes, with at least one tensor each."""
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
    """Copy tensors into a bucket; they may change afterwards."""
    entries, end = [], 0
    for name, tensor in weights:
        entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end))
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    data = torch.empty(end, dtype=torch.uint8, device=device or weights[0][1].device)
    copy_all([_view(entry, data) for entry in entries], [tensor for _, tensor in weights])
    return Bucket(tuple(entries), data)


def unpack(header: dict[str, Any], data: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors by name, as views into `data`."""
    entries = [Entry(row["name"], row["dtype"], tuple(row["shape"]), row["offset"]) for row in header["entries"]]
    return [(entry.name, _view(entry, data)) for entry in entries]


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target, all of a type in one call."""
    of_type: dict[tuple[torch.dtype, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for target, source in zip(targets, sources, strict=True):
        of_type[target.dtype, source.dtype].append((target, source))
    with torch.no_grad():
        for pairs in of_type.values():
            torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _view(entry: Entry, data: torch.Tensor) -> torch.Tensor:
    return data[entry.offset : entry.offset + entry.nbytes].view(_dtype(entry.dtype)).view(entry.shape)


@cache
def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype of torch")
    return dtype
