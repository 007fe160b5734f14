"""The figures of a forecast. Needs the standard library only, so that pages are written without Megatron."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Forecast:
    """A step of one setting on the ranks of a trainer. Memory is in GB (10^9 bytes), of the fullest rank."""

    name: str  # of the case or of the measured run
    setting: str
    ranks: int
    card: str
    weight_sync_gb: float | None  # None: no engine is in the ranks
    generation_gb: float | None
    train_gb: float
    train_in_pytorch_gb: float  # of train_gb, without CUDA, NCCL and a vLLM that sleeps: what a benchmark measures
    fits: bool
    train_seconds: float
    generation_seconds: float | None  # None: servers generate, or nothing does

    @property
    def seconds(self) -> float:
        """Return what `--check` guesses of a step: without weight sync and offloading; next to servers, training."""
        return self.train_seconds + (self.generation_seconds or 0.0)
