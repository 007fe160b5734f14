"""The plans of packing/plan.py and packing/bundles.py in plain Python, one item after the other.

Nothing here is fast. Every sum is added from left to right, as the plan requires.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from swift_megatron_grpo.packing.flops import FlopsModel

Assignment = tuple[tuple[tuple[int, ...], ...], ...]


class Planned(NamedTuple):
    assignment: Assignment
    over_budget: tuple[int, ...]


def added(values: Sequence[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total


def best_fit_decreasing(sizes: Sequence[int], room: int) -> int:
    """Return the number of bins, computed in the simplest way; the planner must not open more."""
    rooms: list[int] = []
    for size in sorted((min(size, room) for size in sizes), reverse=True):
        tightest = min((left for left in rooms if left >= size), default=None)
        if tightest is not None:
            rooms.remove(tightest)
        rooms.append((room if tightest is None else tightest) - size)
    return len(rooms)


def assign(
    sizes: Sequence[int], work: Sequence[float], room: int, ranks: int, per_rank: int, evenly: int
) -> list[int] | None:
    """Return the bin of each item; None: one fits into no bin."""
    held: list[list[int]] = [[] for _ in range(ranks * per_rank)]
    of_bin, of_rank = [0.0] * len(held), [0.0] * ranks
    chosen: list[int] = []
    for item, size in enumerate(sizes):
        must_open = len(sizes) - item == sum(not items for items in held)

        def fits(b: int, size: int = size, must_open: bool = must_open) -> bool:
            return not held[b] if must_open else sum(sizes[i] for i in held[b]) + size <= room

        def preferred(b: int, item: int = item) -> tuple[float, int]:
            return (of_bin[b] if item < evenly else -sum(sizes[i] for i in held[b])), b

        bins = [range(rank * per_rank, (rank + 1) * per_rank) for rank in range(ranks)]
        open_ranks = [rank for rank in range(ranks) if any(map(fits, bins[rank]))]
        if not open_ranks:
            return None
        rank = min(open_ranks, key=lambda rank: (of_rank[rank], rank))
        b = min(filter(fits, bins[rank]), key=preferred)
        held[b].append(item)
        of_bin[b] += work[item]
        of_rank[rank] += work[item]
        chosen.append(b)
    return chosen


def plan_items(padded: Sequence[int], work: Sequence[float], ranks: int, room: int, multiple: int) -> Planned:
    order = sorted(range(len(padded)), key=lambda i: (-padded[i], -work[i], i))
    sizes, in_order = [min(padded[i], room) for i in order], [work[i] for i in order]
    fewest, unit = best_fit_decreasing(sizes, room), ranks * multiple
    count = min(math.ceil(fewest / unit), len(padded) // unit) * unit
    packed: list[int] | None
    if count < fewest:
        tokens = [padded[i] for i in order]
        packed = _dealt(assign(tokens, [float(t) for t in tokens], sum(tokens), 1, count, len(order)), in_order, ranks)
    else:
        packed = (
            assign(sizes, in_order, room, ranks, count // ranks, len(order))
            or assign(sizes, in_order, room, ranks, count // ranks, len(order) // 2)
            or _dealt(assign(sizes, in_order, room, 1, count, 0), in_order, ranks)
        )
    batches = [sorted(order[place] for place, b in enumerate(packed) if b == batch) for batch in range(count)]
    per_rank = count // ranks
    of_ranks = [batches[start : start + per_rank] for start in range(0, count, per_rank)]
    tokens_of = [sum(padded[i] for i in batch) for batch in batches]
    return Planned(
        tuple(tuple(map(tuple, sorted(rank, key=lambda batch: -sum(padded[i] for i in batch)))) for rank in of_ranks),
        tuple(sorted(i for batch, tokens in zip(batches, tokens_of, strict=True) if tokens > room for i in batch)),
    )


def _dealt(packed: list[int] | None, work: Sequence[float], ranks: int) -> list[int]:
    """Deal whole bins to the ranks, the one with the most work first."""
    assert packed is not None
    count = max(packed) + 1
    totals = [added([work[i] for i, b in enumerate(packed) if b == number]) for number in range(count)]
    order = sorted(range(count), key=lambda b: (-totals[b], b))
    places = assign([1] * count, [totals[b] for b in order], 1, ranks, count // ranks, count)
    assert places is not None
    new = dict(zip(order, places, strict=True))
    return [new[b] for b in packed]


def plan_sharing(
    lengths: Sequence[int],
    heads: Sequence[int],
    shared: Sequence[int],
    cost: FlopsModel,
    ranks: int,
    room: int,
    multiple: int,
) -> Planned | None:
    """Return the plan whose slowest rank has the least work, of parts of groups. `shared`: with the one before."""

    def tokens(part: range) -> int:
        return sum(lengths[i] for i in part) - sum(shared[i] for i in part[1:])

    def flops(part: range) -> float:
        own = added([cost.of_sequence(lengths[i], 0) for i in part])
        saved = added([cost.of_sequence(shared[i], 0) for i in part[1:]])
        return own - saved + cost.per_completion_token * sum(heads[i] for i in part)

    def parts(samples: range, size: int) -> list[range]:
        for number in range(math.ceil(len(samples) / size), len(samples) + 1):
            edges = [samples.start + len(samples) * part // number for part in range(number + 1)]
            found = [range(begin, end) for begin, end in pairwise(edges)]
            if all(len(part) == 1 or tokens(part) <= room for part in found):
                break
        return found

    starts = [i for i, tokens_shared in enumerate(shared) if tokens_shared == 0]
    groups = [range(begin, end) for begin, end in pairwise([*starts, len(shared)])]
    best: Planned | None = None
    least = math.inf
    size = max(map(len, groups))
    while size > 1:
        bundles = [part for samples in groups for part in parts(samples, size)]
        size = math.ceil(size / 2)
        if len(bundles) < ranks * multiple or all(len(part) == 1 for part in bundles):
            continue
        work = list(map(flops, bundles))
        plan = plan_items(list(map(tokens, bundles)), work, ranks, room, multiple)
        slowest = max(added([work[b] for batch in rank for b in batch]) for rank in plan.assignment)
        if slowest < least:
            least = slowest
            best = Planned(
                tuple(tuple(tuple(i for b in batch for i in bundles[b]) for batch in rank) for rank in plan.assignment),
                tuple(i for b in plan.over_budget for i in bundles[b]),
            )
        if slowest < 1.02 * sum(work) / ranks:
            break
    return best
