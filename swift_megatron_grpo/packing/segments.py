"""The order of tokens in a packed micro batch: whole sequences, or trees of what neighbours have in common.

Completions of a prompt share the tokens before their first trained one. Sequences of a completion, and completions that
continue each other's turns, also share trained tokens. What is shared is in the micro batch once; for attention, each
sequence continues it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from swift_megatron_grpo.packing.bins import Ints
from swift_megatron_grpo.packing.outlines import OutlinedSamples
from swift_megatron_grpo.packing.plan import Alignment, padded_lengths
from swift_megatron_grpo.types import Sample

LEAST_TRAINED = 16  # tokens behind the first trained one that two samples must have in common to share them


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one sample, which later samples may share."""

    sample: int  # place in the micro batch
    begin: int  # first token, counted from the sample's first
    end: int  # behind the last token
    start: int  # place of the first token in the micro batch
    room: int  # tokens including padding
    prefix: int | None = None  # the segment that ends before the first token; None: the sample begins here

    @property
    def keys(self) -> int:
        """Return the number of tokens that the last of these attends to, padding included."""
        return self.begin + self.room


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Segments in the order of their samples. What is shared comes before what continues it."""

    segments: tuple[Segment, ...]

    @property
    def total(self) -> int:
        return self.segments[-1].start + self.segments[-1].room

    @property
    def lengths(self) -> list[int]:
        return [segment.room for segment in self.segments]

    @property
    def shares(self) -> bool:
        return any(segment.prefix is not None for segment in self.segments)

    def places(self, number: int) -> torch.Tensor:
        """Return the places [t] of all tokens of one sample."""
        last = next(segment for segment in reversed(self.segments) if segment.sample == number)
        return self._places(last, last.end - last.begin)

    def key_places(self) -> torch.Tensor:
        """Return the places of the tokens that each segment attends to, one segment after the other."""
        return torch.cat([self._places(segment, segment.room) for segment in self.segments])

    def _places(self, segment: Segment, count: int) -> torch.Tensor:
        """Return the places of all tokens before a segment, and of its first `count` tokens."""
        before = [torch.arange(part.start, part.start + part.end - part.begin) for part in self._prefixes(segment)]
        return torch.cat([*reversed(before), torch.arange(segment.start, segment.start + count)])

    def _prefixes(self, segment: Segment) -> Iterator[Segment]:
        while segment.prefix is not None:
            segment = self.segments[segment.prefix]
            yield segment


def lay_out(samples: Sequence[Sample], align: Alignment, share_prompts: bool) -> PackedLayout:
    """Return the layout of a micro batch of these samples. Sharing requires that no sequence is cut (CP 1)."""
    common = shared_with_previous(samples).tolist() if share_prompts else [0] * len(samples)
    pieces = _pieces([sample.length for sample in samples], common)
    rooms = padded_lengths([end - begin for _, begin, end, _ in pieces], align)
    starts = accumulate(rooms, initial=0)
    return PackedLayout(
        tuple(
            Segment(number, begin, end, start, room, prefix)
            for (number, begin, end, prefix), start, room in zip(pieces, starts, rooms, strict=False)
        )
    )


def _pieces(lengths: Sequence[int], common: Sequence[int]) -> list[tuple[int, int, int, int | None]]:
    """Return sample, begin, end and prefix of each segment: a prefix before what continues it."""
    pieces: list[tuple[int, int, int, int | None]] = []
    todo: list[tuple[range, int, int | None]] = [(range(len(lengths)), 0, None)]  # samples, first token, prefix
    while todo:
        samples, begin, prefix = todo.pop()
        if len(samples) == 1:
            pieces.append((samples.start, begin, lengths[samples.start], prefix))
            continue
        shared = min(common[i] for i in samples[1:])
        if shared > begin:
            pieces.append((samples.start, begin, shared, prefix))
            prefix = len(pieces) - 1
        edges = [samples.start, *(i for i in samples[1:] if common[i] == shared), samples.stop]
        todo += reversed([(range(first, stop), shared, prefix) for first, stop in pairwise(edges)])
    return pieces


def shared_with_previous(samples: Sequence[Sample]) -> Ints:
    """Return how many tokens each sample begins with like the one before it, which they share; 0: it shares none.

    4 million tokens are compared in 0.1 s.
    """
    if isinstance(samples, OutlinedSamples):
        return samples.prompts.shared_with_previous()
    pairs = pairwise(samples)
    shared = [shared_tokens(one, other) if one.group == other.group else 0 for one, other in pairs]
    return np.array([0, *shared][: len(samples)], np.int64)


def shared_tokens(one: Sample, other: Sample) -> int:
    """Return the number of tokens that both begin with, of which one is left in each; images count whole.

    Completions that stay on their rank share their prompt: all ranks know that it is in common if both have the same
    row of the dataset.
    """
    leading = min(one.leading, other.leading)
    if not one.tokens or not other.tokens:
        if one.body is None or other.body is None or one.body.prompt_id != other.body.prompt_id:
            return 0
        return min(leading, one.body.prompt, other.body.prompt)
    shared = _common(one.tokens, other.tokens, 0, leading)
    if shared == leading and one.body is None and other.body is None:
        longer = _common(one.tokens, other.tokens, leading, min(one.length, other.length) - 1)
        shared = longer if longer >= leading + LEAST_TRAINED else leading
    while True:
        cut = min(_cut_at_images(one, other, shared), _cut_at_images(other, one, shared))
        if cut == shared:
            return shared
        shared = cut


def _common(tokens: Sequence[int], others: Sequence[int], begin: int, end: int) -> int:
    """Return where both begin to differ, from `begin` on; `end` if they do not."""
    while begin < end:
        stop = min(begin + 1024, end)  # most slices are equal as a whole
        if tokens[begin:stop] != others[begin:stop]:
            return next(i for i in range(begin, stop) if tokens[i] != others[i])
        begin = stop
    return end


def _cut_at_images(one: Sample, other: Sample, shared: int) -> int:
    """Return the tokens before the first image that only one of both has, or that does not end before `shared`."""
    for number, placed in enumerate(other.images):
        if placed.start >= shared:
            break
        same = number < len(one.images) and one.images[number] == placed
        if not same or placed.start + placed.image.num_tokens > shared:
            return placed.start
    return shared
