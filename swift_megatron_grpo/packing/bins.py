"""Bins of one size on several ranks: items have sizes, which must fit, and work, which must be equal over the ranks.

Many ranks take their next items at once, in arrays: the result is that of one item after the other, to the bit.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
Objects = np.ndarray[Any, np.dtype[np.object_]]


def sums(numbers: Ints, values: Floats | Ints, count: int) -> Floats:
    """Return the sums of values by number, each added in the order of the values: numpy's other sums are not."""
    return np.bincount(numbers, values, minlength=count).astype(np.float64, copy=False)


def fewest_bins(sizes: Ints, room: int) -> int:
    """Return the number of bins that best-fit decreasing opens: each size goes where it leaves the least room.

    Bins with as much room are alike, and the items of one size fill the tightest of them first, so both are counted.
    """
    opened = 0
    rooms: list[int] = []  # of open bins, sorted, each once
    bins: dict[int, int] = {}  # by room

    def add(left: int, number: int) -> None:
        if number and left not in bins:
            insort(rooms, left)
        if number:
            bins[left] = bins.get(left, 0) + number

    numbers = np.bincount(sizes)
    [values] = numbers.nonzero()
    for size, items in zip(values[::-1].tolist(), numbers[values][::-1].tolist(), strict=True):
        while items:
            at = bisect_left(rooms, size)
            if at < len(rooms):
                left = rooms.pop(at)
                tightest = bins.pop(left)
            else:
                left, tightest = room, -(-items // (room // size))
                opened += tightest
            each = left // size
            full, rest = divmod(min(items, tightest * each), each)
            items -= full * each + rest
            add(left - each * size, full)
            add(left - rest * size, int(rest > 0))
            add(left, tightest - full - (rest > 0))
    return opened


def assign(sizes: Ints, work: Floats, room: int, ranks: int, per_rank: int, evenly: int) -> Ints | None:
    """Assign items, of which none is larger than the one before, to the rank with the least work.

    Returns the bin of each item, or None if one fits into no bin; every rank has `per_rank` bins, numbered rank by
    rank. Within the rank, the first `evenly` items go to the bin with the least work that has room, the others where
    they leave the least room. No bin stays empty.

    In a round, the ranks with the least work take an item each, in order of their work, until one that has taken an
    item would be next again.
    """
    total = len(sizes)
    if ranks == 1:
        alone = _assign_to_one(sizes.tolist(), work.tolist(), room, per_rank, evenly)
        return None if alone is None else np.array(alone)
    result = np.empty(total, np.int64)
    free = np.full((ranks, per_rank), room)
    most_free = np.full(ranks, room)
    of_bins, of_ranks = np.zeros((ranks, per_rank)), np.zeros(ranks)
    empty = ranks * per_rank
    begin = 0
    while begin < total:
        spare = total - begin - empty  # items that need not open a bin
        need = sizes[begin : begin + ranks] if spare else np.full(ranks, room)  # the last items open the empty bins
        [open_ranks] = (most_free >= need[0]).nonzero()
        if not len(open_ranks):
            return None
        by_room = begin >= evenly
        end = min(begin + len(open_ranks), begin + (spare or ranks), total if by_room else evenly, total)
        loads = of_ranks[open_ranks]
        order = np.argsort(loads, kind="stable")[: end - begin]
        loads, taking = loads[order], open_ranks[order]
        after = loads + work[begin:end]
        waits = loads[1:] >= np.minimum.accumulate(after)[:-1]
        if len(open_ranks) < ranks:  # a smaller item may fit where this one does not
            closed = most_free[most_free < need[0]].max()
            waits |= need[1 : end - begin] <= closed
        if waits.any():
            end = begin + 1 + int(waits.argmax())
        taking, need = taking[: end - begin], need[: end - begin]
        rooms = free[taking]
        keys = np.where(rooms >= need[:, None], rooms if by_room else of_bins[taking], np.inf)
        chosen = keys.argmin(1)
        empty -= int(np.count_nonzero(rooms[np.arange(len(taking)), chosen] == room))
        free[taking, chosen] -= sizes[begin:end]
        most_free[taking] = free[taking].max(1)
        of_bins[taking, chosen] += work[begin:end]
        of_ranks[taking] = after[: end - begin]
        result[begin:end] = taking * per_rank + chosen
        begin = end
    return result


def _assign_to_one(
    sizes: Sequence[int], work: Sequence[float], room: int, per_rank: int, evenly: int
) -> list[int] | None:
    """Assign items to the bins of one rank, one after the other, for which lists are faster."""
    free, empty, smallest = [room] * per_rank, per_rank, min(sizes)
    candidates: list[tuple[float, int]] = [(0.0, b) for b in range(per_rank)]  # sorted by work or, later, by room
    bins: list[int] = []
    for item, size in enumerate(sizes):
        by_room = item >= evenly
        if item == evenly:
            candidates = sorted((free[b], b) for _, b in candidates)
        need = room if len(sizes) - item == empty else size
        if by_room:
            at = bisect_left(candidates, (need, 0))
        else:
            at = next((place for place, (_, b) in enumerate(candidates) if free[b] >= need), len(candidates))
        if at == len(candidates):
            return None
        of_bin, chosen = candidates.pop(at)
        empty -= free[chosen] == room
        free[chosen] -= size
        if free[chosen] >= smallest:
            insort(candidates, (free[chosen] if by_room else of_bin + work[item], chosen))
        bins.append(chosen)
    return bins
