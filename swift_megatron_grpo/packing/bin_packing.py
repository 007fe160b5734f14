"""Packs items of given sizes into bins of one size. Pure Python and deterministic.

Written here because the items have two measures: sizes, which must fit, and work, which must be equal over ranks that
all have the same number of bins.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def fewest_bins(sizes: Sequence[int], room: int) -> int:
    """Return the number of bins that best-fit decreasing opens: each size goes where it leaves the least room."""
    rooms: list[int] = []
    for size in sizes:
        at = bisect_left(rooms, size)
        insort(rooms, (rooms.pop(at) if at < len(rooms) else room) - size)
    return len(rooms)


def assign(
    order: Sequence[int],
    sizes: Sequence[int],
    work: Sequence[float],
    room: int,
    ranks: int,
    per_rank: int,
    evenly: int,
) -> list[list[int]] | None:
    """Assign items, in `order`, to the rank with the least work.

    Returns `per_rank` bins per rank, or None if an item fits into no bin. Within the rank, the first `evenly` items go
    to the bin with the least work that has room, the others where they leave the least room. No bin stays empty.
    """
    bins: list[list[int]] = [[] for _ in range(ranks * per_rank)]
    free = [room] * len(bins)
    least_work = [(0.0, rank) for rank in range(ranks)]
    # Bins of each rank, sorted by work or, later, by room.
    bins_of: list[list[tuple[float, int]]] = [
        [(0.0, rank * per_rank + b) for b in range(per_rank)] for rank in range(ranks)
    ]
    empty = len(bins)
    smallest = min(sizes)
    for position, item in enumerate(order):
        by_room = position >= evenly
        if position == evenly:
            bins_of = [sorted((free[b], b) for _, b in candidates) for candidates in bins_of]
        # The last items open the bins that are still empty.
        need = room if len(order) - position == empty else sizes[item]
        for turn in range(ranks):
            rank_work, rank = least_work[turn]
            place = _first_with_room(bins_of[rank], free, need, by_room)
            if place is not None:
                break
        else:
            return None
        bin_work, chosen = bins_of[rank].pop(place)
        empty -= not bins[chosen]
        bins[chosen].append(item)
        free[chosen] -= sizes[item]
        if free[chosen] >= smallest:
            insort(bins_of[rank], (free[chosen] if by_room else bin_work + work[item], chosen))
        least_work.pop(turn)
        insort(least_work, (rank_work + work[item], rank))
    return bins


def _first_with_room(
    candidates: Sequence[tuple[float, int]], free: Sequence[int], need: int, by_room: bool
) -> int | None:
    if by_room:
        at = bisect_left(candidates, (need, 0))
        return at if at < len(candidates) else None
    for at, (_, chosen) in enumerate(candidates):
        if free[chosen] >= need:
            return at
    return None
