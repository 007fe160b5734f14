"""Whether an engine runs the weights that were exported, and what is wrong if it does not. No process, no device here.

A manifest notes what one export sent. Against it stand the manifest of the export before (the same names, shapes and
types), what the engines hold (`full`: a checksum for each tensor), and log-probs of a fixed text (`canary`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from swift_megatron_grpo.protocol.buckets import NamedWeights
from swift_megatron_grpo.protocol.held_weights import HeldSlice, WorkerWeights, checksum, to_integers

NAMED = 8  # tensors of a kind that a message names


@dataclass(frozen=True, slots=True)
class Problem:
    where: str  # an engine, or the trainer
    what: str
    tensor: str = ""  # none: it is not about tensors
    numbers_only: bool = False  # it shows in what the engine computes, and may come from anywhere


def describe(problems: Iterable[Problem]) -> str:
    """One line for each kind of problem."""
    lines = []
    for what, kind in groupby(sorted(set(problems), key=lambda each: each.what), key=lambda each: each.what):
        found = list(kind)
        tensors = _some({each.tensor for each in found if each.tensor}, NAMED)
        lines.append(f"{_some({each.where for each in found}, 2)}: {what}" + (f": {tensors}" if tensors else ""))
    return "\n".join(lines)


def _some(names: Collection[str], number: int) -> str:
    more = f" and {len(names) - number} more" if len(names) > number else ""
    return ", ".join(sorted(names)[:number]) + more


# ---- what was sent


@dataclass(frozen=True, slots=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtype: torch.dtype


class Manifest:
    """What one export sends. `dtype`: of the engine's weights, for checksums; None: names and specs are enough."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.specs: dict[str, TensorSpec] = {}
        self._dtype = dtype
        self._checksums: dict[str, torch.Tensor] = {}

    def watch(self, weights: NamedWeights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self.specs[name] = TensorSpec(tuple(tensor.shape), tensor.dtype)
            if self._dtype is not None:
                self._checksums[name] = checksum(tensor, self._dtype)
            yield name, tensor

    def checksums(self) -> dict[str, int]:
        return dict(zip(self._checksums, to_integers(self._checksums.values()), strict=True))


def changed_specs(before: Mapping[str, TensorSpec], now: Mapping[str, TensorSpec]) -> list[Problem]:
    """Every export sends the same tensors."""
    missing = [Problem("trainer", "not sent, and the sync before did", name) for name in before if name not in now]
    new = [Problem("trainer", "sent, and the sync before did not", name) for name in now if name not in before]
    shared = [name for name in now if name in before and now[name] != before[name]]
    return [*missing, *new, *(Problem("trainer", "sent in another shape or type than before", name) for name in shared)]


# ---- what an engine holds


def compare_with_sent(
    specs: Mapping[str, TensorSpec], checksums: Mapping[str, int], held_weights: Iterable[WorkerWeights]
) -> tuple[list[Problem], set[str]]:
    """What engines hold against what was sent; and the tensors that cannot be read back. Each engine's workers are all
    there."""
    by_engine: dict[str, list[WorkerWeights]] = defaultdict(list)
    for holding in held_weights:
        by_engine[holding.engine].append(holding)
    problems = [
        Problem(engine, what, tensor)
        for engine, workers in by_engine.items()
        for what, tensor in _faults(specs, checksums, workers)
    ]
    return problems, {name for workers in by_engine.values() for worker in workers for name in worker.unreadable}


def _faults(
    specs: Mapping[str, TensorSpec], checksums: Mapping[str, int], workers: Sequence[WorkerWeights]
) -> Iterator[tuple[str, str]]:
    """Of one engine."""
    ignored = set.intersection(*(set(worker.ignored) for worker in workers))
    unreadable = {name for worker in workers for name in worker.unreadable}
    for name, form in specs.items():
        pieces = [held for worker in workers for held in worker.held.get(name, ())]
        fault = None if name in unreadable else _fault(pieces, torch.Size(form.shape).numel(), checksums[name])
        if name in ignored:
            yield "sent, and the engine has no place for it", name
        elif fault is not None:
            yield fault, name
    for worker in workers:
        yield from (("not sent", name) for name in worker.held if name not in specs)
        yield from (("weights that nothing sent is for", name) for name in worker.unwritten)


def _fault(pieces: Sequence[HeldSlice], numel: int, expected: int) -> str | None:
    different = {held.piece: held.checksum for held in pieces}  # workers may hold copies of one piece
    if any(different[held.piece] != held.checksum for held in pieces):
        return "two copies in the engine differ"
    if sum(piece.numel for piece in different) != numel:
        return "the engine holds only a part of it"
    if sum(different.values()) % 2**64 != expected:
        return "the engine holds other values than were sent"
    return None


# ---- what it computes


@dataclass(frozen=True, slots=True)
class Difference:
    """Of log-probs per token, in absolute value."""

    mean: float
    max: float

    @classmethod
    def of(cls, one: Sequence[float], other: Sequence[float]) -> Difference:
        if not one or len(one) != len(other):
            return cls(math.inf, math.inf)
        apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
        if not all(map(math.isfinite, apart)):
            return cls(math.inf, math.inf)
        return cls(sum(apart) / len(apart), max(apart))

    @classmethod
    def largest(cls, differences: Iterable[Difference]) -> Difference:
        found = list(differences)
        return cls(max((each.mean for each in found), default=0.0), max((each.max for each in found), default=0.0))


@dataclass(frozen=True, slots=True)
class Bound:
    """How far log-probs of the same weights may be apart: two implementations round differently."""

    mean: float  # never more
    max: float  # never more, at any token
    jump: float  # never this many times as far as after the syncs before, ...
    floor: float  # ... unless it is less than this

    def exceeded(self, found: Difference, usual: float | None) -> str | None:
        """`usual`: the mean after the syncs that were good. None: it is within the bound."""
        what = f"log-probs of a fixed text are {found.mean:.2g} from the trainer's on average, {found.max:.2g} at most"
        if found.mean > self.mean or found.max > self.max:
            return f"{what}; rounding makes {self.mean:.2g} and {self.max:.2g}"
        if usual is not None and found.mean > max(self.jump * usual, self.floor):
            return f"{what}; on average it was {usual:.2g} so far"
        return None


_16_BITS = Bound(mean=0.25, max=5.0, jump=8.0, floor=2e-3)
BOUNDS: Mapping[torch.dtype, Bound] = {
    torch.bfloat16: _16_BITS,
    torch.float16: _16_BITS,
    torch.float32: Bound(mean=1e-3, max=2e-2, jump=8.0, floor=1e-5),
}
