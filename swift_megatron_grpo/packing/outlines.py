"""The samples of a step as arrays of integers, from which a step is planned and counted.

Where completions stay on their ranks, a step has the samples of all ranks, and a rank needs the objects of a few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from swift_megatron_grpo.packing.arrays import Columns, Outlined
from swift_megatron_grpo.packing.bins import Bools, Ints
from swift_megatron_grpo.types import Sample


@dataclass(frozen=True, slots=True)
class Outline(Columns):
    """The integers of samples, each [s]."""

    lengths: Ints
    trained: Ints
    groups: Ints
    completions: Ints
    left_out: Ints
    homes: Ints  # the rank that has the tokens first; -1: all ranks have them
    answers: Bools  # given answers, which SFT trains

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Outline:
        """Return the outline of any samples."""
        if isinstance(samples, OutlinedSamples):
            return samples.outline

        def column(values: Iterable[int]) -> Ints:
            return np.fromiter(values, np.int64, len(samples))

        return cls(
            lengths=column(sample.length for sample in samples),
            trained=column(sample.trained for sample in samples),
            groups=column(sample.group for sample in samples),
            completions=column(sample.completion for sample in samples),
            left_out=column(sample.left_out for sample in samples),
            homes=column(-1 if sample.body is None else sample.body.home for sample in samples),
            answers=np.fromiter((sample.sft_weights is not None for sample in samples), np.bool_, len(samples)),
        )


@dataclass(frozen=True, slots=True)
class Prompts(Columns):
    """The prompts of samples, each [s]."""

    number: Ints  # ascends; equal for neighbours that have a prompt in common
    shareable: Ints  # tokens of it that a micro batch may have once

    def shared_with_previous(self) -> Ints:
        """Return how many tokens each sample shares with the one before it."""
        one_prompt = np.diff(self.number, prepend=-1) == 0
        both = np.minimum(self.shareable, np.concatenate([self.shareable[:1], self.shareable[:-1]]))
        return np.where(one_prompt, both, 0)


class OutlinedSamples(Outlined[Sample]):
    """Samples without tokens of their own."""

    def __init__(self, outline: Outline, prompts: Prompts, make: Callable[[int], Sample]) -> None:
        super().__init__(len(outline), make)
        self.outline, self.prompts = outline, prompts

    def pick(self, places: Ints) -> OutlinedSamples:
        outline, prompts = self.outline.pick(places), self.prompts.pick(places)
        return OutlinedSamples(outline, prompts, lambda i: self[int(places[i])])


def changed(samples: Sequence[Sample], change: Callable[[Sample], Sample]) -> Sequence[Sample]:
    """Return samples with other values, but the same integers."""
    if isinstance(samples, OutlinedSamples):
        return OutlinedSamples(samples.outline, samples.prompts, lambda i: change(samples[i]))
    return [change(sample) for sample in samples]
