"""Packed tokens as rows of sequences, for losses that read whole sequences.

m: trained tokens of the micro batch, s: its sequences, w: tokens of the longest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swift_megatron_grpo.packing.collate import MicroBatch


@dataclass(frozen=True, slots=True)
class Rows:
    """Index of packed tokens in a grid of sequences.

    Every index is used once, so gradients are summed in a fixed order: no atomics, and runs are reproducible.
    """

    lengths: torch.Tensor  # [s]
    width: int
    places: torch.Tensor  # [m] cell of token i among the s * w cells

    @classmethod
    def of(cls, batch: MicroBatch) -> Rows:
        """Return the rows of this micro batch."""
        lengths = batch.lengths
        tokens = sum(batch.counts)
        width = max(batch.counts)
        sequence = torch.arange(len(batch.counts), device=lengths.device).repeat_interleave(lengths, output_size=tokens)
        starts = lengths.cumsum(0) - lengths
        places = torch.arange(tokens, device=lengths.device) - starts[sequence] + sequence * width
        return cls(lengths, width, places)

    def lay(self, values: torch.Tensor) -> torch.Tensor:
        """Lay tokens out as a grid: [m] -> [s, w], zeros after the end of a sequence."""
        cells = values.new_zeros(len(self.lengths) * self.width)
        return cells.index_copy(0, self.places, values).view(len(self.lengths), self.width)

    def pick(self, grid: torch.Tensor) -> torch.Tensor:
        """Return the tokens of a grid: [s, w] -> [m]."""
        return grid.reshape(-1).index_select(0, self.places)

    def spread(self, per_sequence: torch.Tensor) -> torch.Tensor:
        """Give each token the value of its sequence: [s] -> [m]."""
        return self.pick(per_sequence[:, None].expand(-1, self.width))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the tokens of each sequence: [m] -> [s]."""
        return self.lay(values).sum(1)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Average over the tokens of each sequence: [m] -> [s]; 0 for a sequence without trained tokens."""
        return self.sum(values) / self.lengths.clamp(min=1)
