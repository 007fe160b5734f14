"""Plans micro batches in which neighbours share what they begin with: whole groups, or equal parts of them.

A part of a group is a bundle, and bundles are assigned as samples are without sharing. Large bundles save most, small
ones can be balanced better between ranks, so several sizes are planned and the plan whose slowest rank has the least
work is taken. Pure Python.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from swift_megatron_grpo.packing.flops import FlopsModel
from swift_megatron_grpo.packing.plan import Alignment, StepPlan, check_samples, plan_by_tokens, plan_items, room_of

BALANCED = 1.02  # work of the slowest rank over the mean, at which no other plan is tried


@dataclass(frozen=True, slots=True)
class SampleWork:
    lengths: Sequence[int]  # tokens
    completions: Sequence[int]  # tokens that the head processes
    images: Sequence[float] | None  # FLOPs of the images of each sample
    cost: FlopsModel
    shared: Sequence[int]  # tokens that each sample shares with the one before it

    def groups(self) -> list[range]:
        """Return the samples that share tokens with their neighbours, and those that share none."""
        edges = [*(i for i, shared in enumerate(self.shared) if shared == 0), len(self.shared)]
        return [range(first, stop) for first, stop in pairwise(edges)]

    def tokens(self, bundle: range) -> int:
        return sum(self.lengths[i] for i in bundle) - sum(self.shared[i] for i in bundle[1:])

    def flops(self, bundle: range) -> float:
        """Return the FLOPs of a bundle; its samples show the same images."""
        shared = [self.shared[i] for i in bundle[1:]]
        text = self.cost.of_bundle([self.lengths[i] for i in bundle], shared, sum(self.completions[i] for i in bundle))
        return text + (0.0 if self.images is None else max(self.images[i] for i in bundle))


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
    repeated = sum(work.flops(range(i, i + 1)) for i in range(len(work.lengths)))
    best = Shared(None, math.inf, repeated / dp_size)
    size = max(map(len, groups))
    while size > 1:
        bundles = [part for group in groups for part in _parts(group, size, work, room)]
        size = -(-size // 2)
        if len(bundles) < dp_size * micro_batch_multiple or all(len(part) == 1 for part in bundles):
            continue
        plan, slowest, mean = _plan(bundles, work, dp_size, room, micro_batch_multiple)
        if slowest < best.shared:
            best = Shared(plan, slowest, best.repeated)
        if slowest < BALANCED * mean:  # smaller bundles have more work
            break
    return best


def gain_of(plan: StepPlan, work: SampleWork) -> Shared:
    """Return a given plan with what sharing saves in its micro batches."""
    shared = []
    repeated = []
    for rank in plan.assignment:
        bundles = [bundle for batch in rank for bundle in _neighbours(batch, work.shared)]
        shared.append(sum(map(work.flops, bundles)))
        repeated.append(sum(work.flops(range(i, i + 1)) for batch in rank for i in batch))
    return Shared(plan, max(shared), max(repeated))


def _neighbours(batch: Sequence[int], shared: Sequence[int]) -> list[range]:
    """Return the bundles of a micro batch: consecutive samples that share tokens."""
    bundles: list[range] = []
    for i in batch:
        if bundles and i == bundles[-1].stop and shared[i]:
            bundles[-1] = range(bundles[-1].start, i + 1)
        else:
            bundles.append(range(i, i + 1))
    return bundles


def _parts(group: range, size: int, work: SampleWork, room: int) -> list[range]:
    """Cut a group into the fewest equal parts of at most `size` samples that fit; a sample that does not fit is one."""
    count = len(group)
    for number in range(-(-count // size), count + 1):
        edges = [group.start + count * part // number for part in range(number + 1)]
        parts = [range(begin, end) for begin, end in pairwise(edges)]
        if all(len(part) == 1 or work.tokens(part) <= room for part in parts):
            break
    return parts


def _plan(
    bundles: Sequence[range], work: SampleWork, dp_size: int, room: int, multiple: int
) -> tuple[StepPlan, float, float]:
    """Return the plan of these bundles, in samples, and the work of its slowest rank and of the mean."""
    flops = [work.flops(bundle) for bundle in bundles]
    plan = plan_items([work.tokens(bundle) for bundle in bundles], flops, dp_size, room, multiple)
    assignment = tuple(
        tuple(tuple(sorted(i for b in batch for i in bundles[b])) for batch in rank) for rank in plan.assignment
    )
    slowest = max(sum(flops[b] for batch in rank for b in batch) for rank in plan.assignment)
    over = tuple(sorted(i for b in plan.over_budget for i in bundles[b]))
    return StepPlan(assignment, over, share_prompts=True), slowest, sum(flops) / dp_size
