"""Packs many tensors into one flat tensor of bytes, and unpacks them. Both ends use it, so it imports torch only."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

NamedWeights = Iterable[tuple[str, torch.Tensor]]

_ALIGNMENT = 16  # bytes; suits every dtype of weights
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Entry(NamedTuple):
    """Name, type and location of a tensor in a bucket. Some 10,000 are made in each sync of a mixture of experts."""

    name: str
    dtype: str
    shape: Sequence[int]
    offset: int  # in bytes


@dataclass(frozen=True, slots=True)
class Bucket:
    header: dict[str, Any]  # the entries in JSON types, which `unpack` needs
    data: torch.Tensor  # [bytes] uint8


def buckets(weights: NamedWeights, nbytes: int, device: torch.device | None = None) -> Iterator[Bucket]:
    """Pack tensors into buckets of at most `nbytes` bytes, with at least one tensor each."""
    waiting: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights:
        if waiting and size + tensor.nbytes > nbytes:
            yield pack(waiting, device)
            waiting = []
            size = 0
        waiting.append((name, tensor))
        size += tensor.nbytes
    if waiting:
        yield pack(waiting, device)


def pack(weights: Sequence[tuple[str, torch.Tensor]], device: torch.device | None = None) -> Bucket:
    """Copy tensors into a bucket; they may change afterwards."""
    entries = []
    end = 0
    for name, tensor in weights:
        entries.append(Entry(name, str(tensor.dtype), tuple(tensor.shape), end))
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    data = torch.empty(end, dtype=torch.uint8, device=device or weights[0][1].device)
    copy_all(_views(entries, data), [tensor for _, tensor in weights])
    return Bucket({"entries": entries}, data)


def unpack(header: dict[str, Any], data: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors by name, as views into `data`."""
    entries = [Entry(*row) for row in header["entries"]]
    return list(zip((entry.name for entry in entries), _views(entries, data), strict=True))


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target, all of a type in one call."""
    of_type: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        of_target, of_source = of_type.setdefault((target.dtype, source.dtype), ([], []))
        of_target.append(target)
        of_source.append(source)
    with torch.no_grad():
        for of_target, of_source in of_type.values():
            torch._foreach_copy_(of_target, of_source)


def _views(entries: Sequence[Entry], data: torch.Tensor) -> list[torch.Tensor]:
    of_dtype = {name: data.view(_DTYPES[name]) for name in {entry.dtype for entry in entries}}
    return [
        of_dtype[dtype].as_strided(shape, contiguous_strides(shape), offset // of_dtype[dtype].itemsize)
        for _, dtype, shape, offset in entries
    ]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[place + 1 :]) for place in range(len(shape)))
