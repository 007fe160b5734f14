"""Statistics of a row of logits, and the part of the vocabulary that a tensor-parallel rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

LOWEST = -1e30  # replaces -inf, because -inf * 0 is NaN


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Columns of the vocabulary that this tensor-parallel rank holds, and the temperature of the logits."""

    first: int  # the token of the first column
    real: int  # columns that are tokens; columns after them are padding
    temperature: float
    group: dist.ProcessGroup | None  # ranks that hold the other columns; None: there are none


@dataclass(frozen=True, slots=True)
class RowStats:
    """Statistics of rows, all [c] fp32. With them, gradients need no second pass over the whole row."""

    logprob: torch.Tensor
    peak: torch.Tensor
    log_total: torch.Tensor
    entropy: torch.Tensor | None  # on request

    def columns(self) -> torch.Tensor:
        """Return log-probs and, if computed, entropies as [c, 1 or 2]."""
        return torch.stack([self.logprob] if self.entropy is None else [self.logprob, self.entropy], -1)

    def of(self, rows: slice) -> RowStats:
        entropy = None if self.entropy is None else self.entropy[rows]
        return RowStats(self.logprob[rows], self.peak[rows], self.log_total[rows], entropy)
