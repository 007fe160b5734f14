"""Fills micro batches of a fixed size: completions of several sequences are any number of sequences.

What is added has two tokens, none of them trained: it is part of no loss, no metric and no count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from swift_megatron_grpo.types import Sample

T = TypeVar("T")
_PER_TOKEN = ("old_logprobs", "ref_logprobs", "teacher_ratios", "teacher_logprobs", "rollout_logprobs", "selected")


@dataclass(frozen=True, slots=True)
class Filled:
    """Samples among which others are spread."""

    samples: Sequence[Sample]
    places: Sequence[int]  # of the given samples, in order

    def of_given(self, values: Mapping[int, T]) -> dict[int, T]:
        """Return the values of the given samples by their number, from values by place."""
        return {number: values[place] for number, place in enumerate(self.places) if place in values}


def filled(samples: Sequence[Sample], multiple: int) -> Filled:
    """Spread sequences evenly until the number of samples is a multiple, so that every rank has given ones.

    Fewer samples than that stay as they are: they are too few for the layout.
    """
    given, total = len(samples), -(-len(samples) // multiple) * multiple
    if given < multiple or total == given:
        return Filled(samples, range(given))
    places = [number * total // given for number in range(given)]
    result = [_sequence_for(samples)] * total
    for place, sample in zip(places, samples, strict=True):
        result[place] = sample
    return Filled(result, places)


def _sequence_for(samples: Sequence[Sample]) -> Sample:
    """Return a sequence that has the same kinds of values per token as the samples, each of no token."""
    sequence = Sample((samples[0].tokens[:1] or [0]) * 2, [False, False], advantage=0.0, group=-1)
    for name in _PER_TOKEN:
        if any(getattr(sample, name) is not None for sample in samples):
            setattr(sequence, name, [])
    return sequence
