"""What the head keeps of a row of logits, and how a tensor-parallel rank reads its columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

LOWEST = -1e30  # instead of -inf, where -inf * 0 would be NaN


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What this tensor-parallel rank holds of it, and how logits are read."""

    first: int  # the token of the first column
    real: int  # columns that are tokens; those after them pad
    temperature: float
    group: dist.ProcessGroup | None  # who holds the rest; None: nobody


@dataclass(frozen=True, slots=True)
class RowStats:
    """All [c] fp32. With them, gradients need no second look at the whole row."""

    logprob: torch.Tensor
    peak: torch.Tensor
    log_total: torch.Tensor
    entropy: torch.Tensor | None  # on request

    def columns(self) -> torch.Tensor:
        """[c, 1 or 2]"""
        return torch.stack([self.logprob] if self.entropy is None else [self.logprob, self.entropy], -1)

    def of(self, rows: slice) -> RowStats:
        entropy = None if self.entropy is None else self.entropy[rows]
        return RowStats(self.logprob[rows], self.peak[rows], self.log_total[rows], entropy)
