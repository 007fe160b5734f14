"""Verifies that an engine runs the exported weights, and reports problems.

A manifest records what one export sends. It is compared with the manifest of the previous export (same names, shapes
and types) and with the checksums of what the engines hold (`full`); log-probs of a fixed text are compared with the
trainer's (`canary`). This file needs no process group and no device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch

from swift_megatron_grpo.weights.transport.buckets import NamedWeights
from swift_megatron_grpo.weights.transport.checksums import Checksums
from swift_megatron_grpo.weights.transport.held_weights import HeldSlice, WorkerWeights

NAMED = 8  # tensors that a message names for each kind of problem


@dataclass(frozen=True, slots=True)
class Problem:
    where: str  # an engine, or the trainer
    what: str
    tensor: str = ""  # empty: the problem is not about a tensor
    numbers_only: bool = False  # the engine's results differ, for an unknown reason


def describe(problems: Iterable[Problem]) -> str:
    lines = []
    for what, group in groupby(sorted(set(problems), key=lambda problem: problem.what), lambda problem: problem.what):
        same_kind = list(group)
        tensors = _some({problem.tensor for problem in same_kind if problem.tensor}, NAMED)
        places = _some({problem.where for problem in same_kind}, 2)
        lines.append(f"{places}: {what}" + (f": {tensors}" if tensors else ""))
    return "\n".join(lines)


def _some(names: Collection[str], number: int) -> str:
    more = f" and {len(names) - number} more" if len(names) > number else ""
    return ", ".join(sorted(names)[:number]) + more


# ---- what was sent


class TensorSpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


class Manifest:
    """Records what one export sends. `dtype`: of the engine's weights, to compute checksums; None: specs only."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.specs: dict[str, TensorSpec] = {}
        self._checksums = None if dtype is None else Checksums(dtype)
        self._names: list[str] = []

    def record(self, weights: NamedWeights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self.specs[name] = TensorSpec(tuple(tensor.shape), tensor.dtype)
            if self._checksums is not None:
                self._checksums.add(tensor)
                self._names.append(name)
            yield name, tensor
        if self._checksums is not None:
            self._checksums.launch()  # before the trainer's weights leave the GPU

    def checksums(self) -> dict[str, int]:
        """Return the checksums of the tensors by name."""
        assert self._checksums is not None
        return dict(zip(self._names, self._checksums.integers(), strict=True))


def changed_specs(before: Mapping[str, TensorSpec], now: Mapping[str, TensorSpec]) -> list[Problem]:
    """Return the differences between two exports, which must send the same tensors."""
    differences = {
        "not sent, unlike in the sync before": before.keys() - now.keys(),
        "sent, unlike in the sync before": now.keys() - before.keys(),
        "sent in another shape or type than before": {name for name in now if now[name] != before.get(name, now[name])},
    }
    return [Problem("trainer", what, name) for what, names in differences.items() for name in names]


# ---- what an engine holds


def compare_with_sent(
    specs: Mapping[str, TensorSpec], checksums: Mapping[str, int], held_weights: Iterable[WorkerWeights]
) -> tuple[list[Problem], set[str]]:
    """Compare what all workers hold with what was sent. Return problems, and tensors that cannot be read back."""
    by_engine: dict[str, list[WorkerWeights]] = defaultdict(list)
    for worker_weights in held_weights:
        by_engine[worker_weights.engine].append(worker_weights)
    problems = [
        Problem(engine, what, tensor)
        for engine, workers in by_engine.items()
        for what, tensor in _engine_problems(specs, checksums, workers)
    ]
    return problems, {name for workers in by_engine.values() for worker in workers for name in worker.unreadable}


def _engine_problems(
    specs: Mapping[str, TensorSpec], checksums: Mapping[str, int], workers: Sequence[WorkerWeights]
) -> Iterator[tuple[str, str]]:
    """Yield the problems of one engine, each with the name of a tensor."""
    ignored = set.intersection(*(set(worker.ignored) for worker in workers))
    unreadable = {name for worker in workers for name in worker.unreadable}
    for name, spec in specs.items():
        slices = [held for worker in workers for held in worker.held.get(name, ())]
        problem = None if name in unreadable else _tensor_problem(slices, prod(spec.shape), checksums[name])
        if name in ignored:
            yield "sent, but the engine has no parameter for it", name
        elif problem is not None:
            yield problem, name
    for worker in workers:
        yield from (("not sent", name) for name in worker.held if name not in specs)
        yield from (("parameters of the engine that no sent tensor writes", name) for name in worker.unwritten)


def _tensor_problem(slices: Sequence[HeldSlice], numel: int, expected: int) -> str | None:
    distinct = {held.slice: held.checksum for held in slices}  # workers may hold copies of one slice
    if any(distinct[held.slice] != held.checksum for held in slices):
        return "two copies in the engine differ"
    if sum(part.numel for part in distinct) != numel:
        return "the engine holds only a part of it"
    if sum(distinct.values()) % 2**64 != expected:
        return "the engine holds other values than were sent"
    return None


# ---- what an engine computes


@dataclass(frozen=True, slots=True)
class Difference:
    """Absolute difference of log-probs per token."""

    mean: float
    max: float

    @classmethod
    def of(cls, one: Sequence[float], other: Sequence[float]) -> Difference:
        """Compare the log-probs of two sides; infinite if they cannot be compared."""
        gaps = [abs(a - b) for a, b in zip(one, other, strict=False)]
        if not gaps or len(one) != len(other) or not all(map(math.isfinite, gaps)):
            return cls(math.inf, math.inf)
        return cls(sum(gaps) / len(gaps), max(gaps))

    @classmethod
    def largest(cls, differences: Iterable[Difference]) -> Difference:
        """Return the largest mean and the largest maximum."""
        pairs = [(0.0, 0.0), *((difference.mean, difference.max) for difference in differences)]
        return cls(*map(max, zip(*pairs, strict=True)))


@dataclass(frozen=True, slots=True)
class Bound:
    """Accepted difference of log-probs of the same weights: two implementations round differently."""

    mean: float  # upper bound of the mean
    max: float  # upper bound at any token
    jump: float  # upper bound of the mean as a multiple of the mean after earlier syncs, ...
    floor: float  # ... if the mean is above this

    def exceeded(self, difference: Difference, usual: float | None) -> str | None:
        """Return a message if the difference exceeds the bound. `usual`: the mean after earlier syncs that passed."""
        mean, most = difference.mean, difference.max
        message = f"log-probs of a fixed text differ from the trainer's by {mean:.2g} on average, {most:.2g} at most"
        if mean > self.mean or most > self.max:
            return f"{message}; rounding explains at most {self.mean:.2g} and {self.max:.2g}"
        if usual is not None and mean > max(self.jump * usual, self.floor):
            return f"{message}; the average after earlier syncs was {usual:.2g}"
        return None


_16_BITS = Bound(mean=0.25, max=5.0, jump=8.0, floor=2e-3)
_32_BITS = Bound(mean=1e-3, max=2e-2, jump=8.0, floor=1e-5)
# TF32, in which Transformer Engine multiplies fp32, rounds 8 times as finely as bf16. SmolLM2-135M shows a mean of
# 0.002 and 0.02 at most on an H200.
_TF32 = Bound(mean=0.03, max=0.6, jump=8.0, floor=2.5e-4)
# e4m3 rounds 16 times as coarsely as bf16. A Qwen3 of 8B with random weights shows means of 0.46 and 0.05 on an H100.
_8_BITS = Bound(mean=1.0, max=10.0, jump=8.0, floor=5e-3)


def bound_of(dtype: torch.dtype, quantized: bool, on_gpu: bool) -> Bound:
    """Return what rounding explains where both sides compute in this precision; `quantized`: vLLM in 8 bits."""
    if quantized:
        return _8_BITS
    if dtype == torch.float32:
        return _TF32 if on_gpu else _32_BITS
    return _16_BITS
