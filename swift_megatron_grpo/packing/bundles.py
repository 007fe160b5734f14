"""Plans micro batches in which neighbours share what they begin with: whole groups, or equal parts of them.

A part of a group is a bundle, and bundles are assigned as samples are without sharing. Large bundles save most, small
ones can be balanced better between ranks, so several sizes are planned and the plan whose slowest rank has the least
work is taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from swift_megatron_grpo.packing.bins import Floats, Ints, sums
from swift_megatron_grpo.packing.flops import FlopsModel
from swift_megatron_grpo.packing.plan import (
    Alignment,
    PlacedItems,
    StepPlan,
    check_samples,
    plan_by_tokens,
    plan_items,
    room_of,
)

BALANCED = 1.02  # work of the slowest rank over the mean, at which no other plan is tried


@dataclass(frozen=True, slots=True)
class Bundles:
    """Runs of samples, by their place in an order of the samples."""

    first: Ints
    count: Ints

    @classmethod
    def starting(cls, first: Ints, samples: int) -> Bundles:
        """Return runs that begin at these places, each of which ends where the next one begins."""
        return cls(first, np.diff(first, append=samples))

    def __len__(self) -> int:
        return len(self.first)

    def numbers(self) -> Ints:
        """Return the bundle of each sample."""
        return np.repeat(np.arange(len(self)), self.count)


@dataclass(frozen=True, slots=True)
class SampleWork:
    lengths: Ints  # tokens
    completions: Ints  # tokens that the head processes
    images: Floats | None  # FLOPs of the images of each sample
    cost: FlopsModel
    shared: Ints  # tokens that each sample shares with the one before it

    def groups(self) -> Bundles:
        """Return the samples that share tokens with their neighbours, and those that share none."""
        return Bundles.starting((self.shared == 0).nonzero()[0], len(self.shared))

    def tokens(self, bundles: Bundles) -> Ints:
        """Return the tokens of each of these bundles, which have all samples."""
        return sums(bundles.numbers(), self.lengths - self._repeated(bundles), len(bundles)).astype(np.int64)

    def flops(self, bundles: Bundles) -> Floats:
        """Return the FLOPs of each bundle; its samples show the same images."""

        def total(values: Floats | Ints) -> Floats:
            return sums(bundles.numbers(), values, len(bundles))

        none = np.zeros(len(self.lengths))
        own = total(self.cost.of_sequence(self.lengths.astype(np.float64), none))
        saved = total(self.cost.of_sequence(self._repeated(bundles).astype(np.float64), none))
        text = own - saved + self.cost.per_completion_token * total(self.completions)
        return text if self.images is None else text + np.maximum.reduceat(self.images, bundles.first)

    def alone(self) -> Floats:
        """Return the FLOPs of each sample that shares nothing."""
        return self.flops(Bundles.starting(np.arange(len(self.lengths)), len(self.lengths)))

    def in_order(self, samples: Ints) -> SampleWork:
        """Return the same samples in another order; neighbours that were none share nothing."""
        follows = np.diff(samples, prepend=-2) == 1
        images = None if self.images is None else self.images[samples]
        shared = np.where(follows, self.shared[samples], 0)
        return SampleWork(self.lengths[samples], self.completions[samples], images, self.cost, shared)

    def _repeated(self, bundles: Bundles) -> Ints:
        repeated = self.shared.copy()
        repeated[bundles.first] = 0
        return repeated


@dataclass(frozen=True, slots=True)
class Shared:
    """A plan, and the work of its slowest rank; with repeated prompts, the least that this can be."""

    plan: StepPlan | None  # None: no micro batch can share a prompt
    shared: float
    repeated: float

    @property
    def gain(self) -> float:
        """Return the share of the work that sharing saves."""
        return 0.0 if self.plan is None else 1 - self.shared / self.repeated


def plan_within(
    budget: int, work: SampleWork, ranks: int, align: Alignment, micro_batch_multiple: int, share_from: float | None
) -> StepPlan:
    """Plan micro batches of at most `budget` tokens; neighbours share tokens if that saves `share_from` of the work."""
    if share_from is not None:
        check_samples(work.lengths, ranks, micro_batch_multiple)
        shared = plan_with_shared_prompts(work, ranks, room_of(budget, align), micro_batch_multiple)
        if shared.plan is not None and 0 < shared.gain >= share_from:
            return shared.plan
    return plan_by_tokens(
        work.lengths, ranks, budget, cost=work.cost, align=align, micro_batch_multiple=micro_batch_multiple,
        completion_lengths=work.completions, image_work=work.images,
    )  # fmt: skip


def shared_if_worth_it(plan: StepPlan, work: SampleWork, share_from: float) -> StepPlan:
    """Let the neighbours of a plan share tokens under the same condition."""
    return replace(plan, share_prompts=0 < gain_of(plan, work).gain >= share_from)


def plan_with_shared_prompts(work: SampleWork, dp_size: int, room: int, micro_batch_multiple: int) -> Shared:
    """Plan micro batches of at most `room` packed tokens, in which bundles share what they begin with."""
    groups = work.groups()
    best = Shared(None, math.inf, float(work.alone().sum()) / dp_size)
    size = int(groups.count.max())
    while size > 1:
        bundles = _parts(groups, size, work, room)
        size = -(-size // 2)
        if len(bundles) < dp_size * micro_batch_multiple or bundles.count.max() == 1:
            continue
        flops = work.flops(bundles)
        placed = plan_items(work.tokens(bundles), flops, dp_size, room, micro_batch_multiple)
        slowest = float(_of_ranks(placed, flops).max())
        if slowest < best.shared:
            of_samples = replace(
                placed,
                places=np.repeat(placed.places, bundles.count),
                over_budget=np.repeat(placed.over_budget, bundles.count),
            )
            best = Shared(of_samples.plan(share_prompts=True), slowest, best.repeated)
        if slowest < BALANCED * float(flops.sum()) / dp_size:  # smaller bundles have more work
            break
    return best


def gain_of(plan: StepPlan, work: SampleWork) -> Shared:
    """Return a given plan with what sharing saves in its micro batches."""
    batches = [batch for of_rank in plan.assignment for batch in of_rank]
    number = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
    planned = work.in_order(np.array([i for batch in batches for i in batch]))
    planned.shared[np.diff(number, prepend=-1) > 0] = 0  # a micro batch has nothing of the one before it
    ranks, bundles = number // plan.num_micro_batches, planned.groups()
    shared = sums(ranks[bundles.first], planned.flops(bundles), len(plan.assignment))
    return Shared(plan, float(shared.max()), float(sums(ranks, planned.alone(), len(plan.assignment)).max()))


def _parts(groups: Bundles, size: int, work: SampleWork, room: int) -> Bundles:
    """Cut groups into the fewest equal parts of at most `size` samples that fit; a sample that does not fit is one."""
    number = -(-groups.count // size)
    while True:
        part = np.arange(number.sum()) - np.repeat(number.cumsum() - number, number)
        begin = np.repeat(groups.first, number) + np.repeat(groups.count, number) * part // np.repeat(number, number)
        parts = Bundles.starting(begin, len(work.lengths))
        too_large = (parts.count > 1) & (work.tokens(parts) > room)
        if not too_large.any():
            return parts
        number = number + (sums(np.repeat(np.arange(len(groups)), number), too_large.astype(np.int64), len(groups)) > 0)


def _of_ranks(placed: PlacedItems, flops: Floats) -> Floats:
    """Return the work of each rank, added in the order in which it runs."""
    in_order = np.argsort(placed.places, kind="stable")
    per_rank = placed.micro_batches // placed.ranks
    return sums(placed.places[in_order] // per_rank, flops[in_order], placed.ranks)
