"""The tensors that an inference engine holds, in terms that engine and trainer share.

The engine's side reads its model, and the trainer's side compares the checksums (checksums.py) with those of the
tensors that it sent. An engine fuses, shards and stacks the tensors that it receives, so it reports slices of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from swift_megatron_grpo.weights.transport.buckets import contiguous_strides


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
