"""Places in the parameters of a model that a traced load has written to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swift_megatron_grpo.weights.transport.held_weights import TensorSlice


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a slice in the model."""

    parameter: str
    offset: int  # in elements of the parameter's storage
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_bytes: int

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def last(self) -> int:
        """Offset of its last element."""
        return self.offset + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the part of the parameter at this place."""
        return parameter.data.as_strided(self.shape, self.strides, self.offset)


@dataclass(frozen=True, slots=True)
class TracedCopy:
    """A slice of a sent tensor, and where a load has copied it to."""

    sent: str
    piece: TensorSlice
    place: Place
