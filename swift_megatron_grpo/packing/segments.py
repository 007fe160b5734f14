"""The order of tokens in a packed micro batch: whole sequences, or prompts followed by their completions.

Neighbours of one group share the tokens that all of them begin with, up to the first trained one. These tokens are in
the micro batch once; for attention, each completion continues them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from swift_megatron_grpo.packing.bundles import Group
from swift_megatron_grpo.packing.plan import Alignment, padded_lengths
from swift_megatron_grpo.types import Sample


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one sample."""

    sample: int  # place in the micro batch
    begin: int  # first token, counted from the sample's first
    end: int  # behind the last token
    start: int  # place of the first token in the micro batch
    room: int  # tokens including padding
    prefix: int | None = None  # place of the `begin` shared tokens before these; None: the sample begins here

    @property
    def keys(self) -> int:
        """Return the number of tokens that the last of these attends to, padding included."""
        return self.begin + self.room

    def places(self, count: int) -> torch.Tensor:
        """Return the places of the prefix, and of the first `count` of these tokens."""
        own = torch.arange(self.start, self.start + count)
        if self.prefix is None:
            return own
        return torch.cat([torch.arange(self.prefix, self.prefix + self.begin), own])


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Segments in the order of their samples. The tokens of a prefix come before those that continue them."""

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
        return last.places(last.end - last.begin)

    def key_places(self) -> torch.Tensor:
        """Return the places of the tokens that each segment attends to, one segment after the other."""
        return torch.cat([segment.places(segment.room) for segment in self.segments])


def lay_out(samples: Sequence[Sample], align: Alignment, share_prompts: bool) -> PackedLayout:
    """Return the layout of a micro batch of these samples. Sharing requires that no sequence is cut (CP 1)."""
    pieces: list[tuple[int, int, int, int | None]] = []  # sample, begin, end, and which piece is the prefix
    for group in groups_of(samples, share_prompts):
        prefix = len(pieces) if group.shared else None
        if group.shared:
            pieces.append((group.samples.start, 0, group.shared, None))
        pieces += [(number, group.shared, samples[number].length, prefix) for number in group.samples]
    rooms = padded_lengths([end - begin for _, begin, end, _ in pieces], align)
    starts = list(accumulate(rooms, initial=0))
    return PackedLayout(
        tuple(
            Segment(number, begin, end, starts[place], rooms[place], None if prefix is None else starts[prefix])
            for place, (number, begin, end, prefix) in enumerate(pieces)
        )
    )


def groups_of(samples: Sequence[Sample], share_prompts: bool = True) -> list[Group]:
    """Return the samples of a step by the tokens that they share: neighbours of one group whose prompts are alike.

    Without `share_prompts` each sample is alone. A sample joins its predecessors if that saves at least as many tokens
    as a new beginning, and if the shared tokens remain half of what they were. A sample that shares none is alone. 4
    million tokens are compared in 0.1 s.
    """
    if not share_prompts:
        return [Group(range(i, i + 1), 0) for i in range(len(samples))]
    groups: list[Group] = []
    first = 0
    while first < len(samples):
        behind = first + 1
        shared = samples[first].leading
        while behind < len(samples) and samples[behind].group == samples[first].group:
            common = shared_tokens(samples[first], samples[behind], shared)
            joined = behind - first
            if common == 0 or joined * common < (joined - 1) * shared or 2 * common < shared:
                break
            behind += 1
            shared = common
        groups.append(Group(range(first, behind), shared if behind - first > 1 else 0))
        first = behind
    return groups


def shared_tokens(first: Sample, other: Sample, at_most: int) -> int:
    """Return the number of tokens that both begin with, before the other's first trained one; images count whole.

    Completions of which a rank has no tokens have their prompt in common, if it is the same row of the dataset.
    """
    at_most = min(at_most, other.leading)
    if not first.tokens or not other.tokens:
        one_prompt = first.body and other.body and first.body.prompt_id == other.body.prompt_id
        return at_most if one_prompt else 0
    shared = _common(first.tokens, other.tokens, at_most)
    while True:
        cut = min(_cut_at_images(first, other, shared), _cut_at_images(other, first, shared))
        if cut == shared:
            return shared
        shared = cut


def _common(tokens: Sequence[int], others: Sequence[int], at_most: int) -> int:
    """Return the number of equal tokens at the beginning. Prompts are mostly equal: that is compared first."""
    if tokens[:at_most] == others[:at_most]:
        return at_most
    return next(i for i in range(at_most) if tokens[i] != others[i])


def _cut_at_images(one: Sample, other: Sample, shared: int) -> int:
    """Return the tokens before the first image that only one of both has, or that does not end before `shared`."""
    for number, placed in enumerate(other.images):
        if placed.start >= shared:
            break
        same = number < len(one.images) and one.images[number] == placed
        if not same or placed.start + placed.image.num_tokens > shared:
            return placed.start
    return shared
