"""The work of an optimizer step, for estimates of its time. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swift_megatron_grpo.packing.flops import FlopsModel


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one optimizer step, on all ranks."""

    training_flops: float  # forward of all samples, once
    head_flops: float  # of these, those of the output layer
    tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class PassCounts:
    """The passes of a step over its samples."""

    trains_adapters: bool = False
    recomputes: bool = False  # in backward
    forward_only: int = 0  # for old and reference log-probs

    @property
    def forward(self) -> int:
        return 1 + self.recomputes + self.forward_only


def work_of(samples: Sequence[tuple[int, int]], flops: FlopsModel) -> StepWork:
    """Return the work of samples of (tokens, completion tokens)."""
    completion_tokens = sum(completion for _, completion in samples)
    return StepWork(
        training_flops=sum(flops.of_sequence(tokens, completion) for tokens, completion in samples),
        head_flops=flops.per_completion_token * completion_tokens,
        tokens=sum(tokens for tokens, _ in samples),
        completion_tokens=completion_tokens,
    )
