"""Which rank trains which completion in which micro batch. Pure Python: every rank finds the same, nobody asks."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from swift_megatron_grpo.packing.flops import FlopsModel


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step: assignment[dp rank][micro batch] = indices of samples."""

    assignment: tuple[tuple[tuple[int, ...], ...], ...]
    over_budget: tuple[int, ...] = ()  # samples in micro batches that are larger than the token budget

    @property
    def num_micro_batches(self) -> int:
        return len(self.assignment[0])

    def of_rank(self, dp_rank: int) -> tuple[tuple[int, ...], ...]:
        return self.assignment[dp_rank]

    def samples_of_ranks(self) -> list[tuple[int, ...]]:
        return [tuple(i for batch in rank for i in batch) for rank in self.assignment]


def plan_by_count(num_samples: int, dp_size: int, micro_batch_size: int) -> StepPlan:
    """Consecutive samples, `micro_batch_size` to a micro batch, the same number of micro batches on every rank."""
    per_rank = dp_size * micro_batch_size
    if num_samples == 0 or num_samples % per_rank:
        raise ValueError(
            f"{num_samples} completions cannot be dealt to {dp_size} data-parallel ranks in micro batches of "
            f"{micro_batch_size}: the number must be a positive multiple of {per_rank}"
        )
    share = num_samples // dp_size
    return StepPlan(
        tuple(
            tuple(
                tuple(range(start, start + micro_batch_size))
                for start in range(rank * share, (rank + 1) * share, micro_batch_size)
            )
            for rank in range(dp_size)
        )
    )


@dataclass(frozen=True, slots=True)
class Alignment:
    """What the layout demands of lengths."""

    sequence: int  # every sequence is a multiple: context parallelism cuts it into 2 * CP pieces
    total: int  # the packed micro batch is a multiple: each CP share is cut again by sequence parallelism

    @classmethod
    def of_layout(cls, tp_size: int, cp_size: int, sequence_parallel: bool) -> Alignment:
        sequence = 2 * cp_size if cp_size > 1 else 1
        return cls(sequence, math.lcm(sequence, cp_size * (tp_size if sequence_parallel else 1)))


def padded_lengths(lengths: Sequence[int], align: Alignment) -> list[int]:
    """Lengths of the sequences of one micro batch after padding: the last one takes what the total still needs."""
    padded = [-(-length // align.sequence) * align.sequence for length in lengths]
    padded[-1] += -sum(padded) % align.total
    return padded


def plan_by_tokens(
    lengths: Sequence[int],
    dp_size: int,
    max_tokens: int,
    cost: FlopsModel,
    align: Alignment,
    micro_batch_multiple: int = 1,
    completion_lengths: Sequence[int] | None = None,
) -> StepPlan:
    """Micro batches of at most `max_tokens` packed tokens, padding included; ranks with equal FLOPs.

    - Every rank has the same number of micro batches, a multiple of `micro_batch_multiple`, none of them empty.
      Megatron's interleaved schedule takes M micro batches if M >= N and M % N is 0 or at least the pipeline-parallel
      size, N being microbatch_group_size_per_vp_stage (that size, unless set): with a virtual pipeline pass N. Without
      one any number runs.
    - There are as few micro batches as best-fit-decreasing packing needs, rounded up to those multiples. What rounding
      leaves unfilled is spread over all of them, so that none of them holds up a pipeline.
      Fill is all padded tokens / (budget * micro batches). Of log-normal lengths (median 700, sigma 0.9, at most 4096)
      4,096 fill at least 97 % of 16k on up to 8 ranks. With 256 on 4 ranks the equal count decides: tokens for 15.9
      budgets go into 16 micro batches, 99 % full; tokens for 16.1 need 20, 80 % full, and get no more than 20.
    - A sample longer than the budget has a micro batch of its own, and `over_budget` of the plan names it.
    - On every rank the largest micro batch comes first: a budget that the memory cannot hold shows at once, and
      expert-parallel ranks, which wait for each other in every layer, run micro batches of like size together.

    `completion_lengths` is what the head works on; None: all tokens.
    """
    _check_samples(lengths, dp_size, micro_batch_multiple)
    padded = [-(-length // align.sequence) * align.sequence for length in lengths]
    if max_tokens < 1:
        raise ValueError(f"a micro batch of {max_tokens} tokens holds nothing; use a budget of 16384, or of 1 or more")
    room = max(max_tokens // align.total, 1) * align.total

    completions = lengths if completion_lengths is None else completion_lengths
    work = [cost.of_sequence(tokens, head) for tokens, head in zip(padded, completions, strict=True)]
    keys = list(zip(padded, work, strict=True))
    longest_first = sorted(range(len(lengths)), key=keys.__getitem__, reverse=True)

    sizes = [min(tokens, room) for tokens in padded]  # a sample over the budget fills a micro batch
    fewest = _fewest_micro_batches([sizes[i] for i in longest_first], room)
    unit = dp_size * micro_batch_multiple
    count = min(-(-fewest // unit), len(lengths) // unit) * unit
    if count >= fewest:
        batches = _deal_within_budget(longest_first, sizes, work, room, dp_size, count)
    else:
        # Fewer samples than the next multiple: as no micro batch may be empty, some share one beyond the budget. Never
        # so if the number of samples is a multiple of `unit`. Equal token counts exceed the budget least.
        joined = _deal(longest_first, padded, padded, sum(padded), 1, count, evenly=len(lengths))
        assert joined is not None
        batches = _deal_whole(joined, work, dp_size)

    per_rank = count // dp_size
    tokens = [sum(padded[i] for i in batch) for batch in batches]
    ranks = [
        sorted(range(start, start + per_rank), key=tokens.__getitem__, reverse=True)
        for start in range(0, count, per_rank)
    ]
    return StepPlan(
        assignment=tuple(tuple(tuple(sorted(batches[b])) for b in rank) for rank in ranks),
        over_budget=tuple(sorted(i for b, batch in enumerate(batches) if tokens[b] > room for i in batch)),
    )


def refill(
    plan: StepPlan,
    lengths: Sequence[int],
    max_tokens: int,
    cost: FlopsModel,
    align: Alignment,
    micro_batch_multiple: int = 1,
) -> StepPlan:
    """The same samples on the same ranks, in micro batches of another budget: for passes without backward."""

    def fill(samples: Sequence[int], multiple: int) -> StepPlan:
        return plan_by_tokens([lengths[i] for i in samples], 1, max_tokens, cost, align, multiple)

    of_ranks = plan.samples_of_ranks()
    most = max(fill(samples, micro_batch_multiple).num_micro_batches for samples in of_ranks)
    smallest = min(map(len, of_ranks)) // micro_batch_multiple * micro_batch_multiple
    if most > smallest:  # a rank has too few samples for as many micro batches as the fullest one needs
        return StepPlan(tuple(tuple(_split_evenly(samples, smallest)) for samples in of_ranks))
    filled = [fill(samples, most) for samples in of_ranks]
    return StepPlan(
        assignment=tuple(
            tuple(tuple(samples[i] for i in batch) for batch in each.assignment[0])
            for samples, each in zip(of_ranks, filled, strict=True)
        ),
        over_budget=tuple(
            sorted(samples[i] for samples, each in zip(of_ranks, filled, strict=True) for i in each.over_budget)
        ),
    )


def regroup(plan: StepPlan, micro_batch_size: int, micro_batch_multiple: int = 1) -> StepPlan:
    """The same samples on the same ranks, `micro_batch_size` or fewer to a micro batch."""
    of_ranks = plan.samples_of_ranks()
    most = -(-max(map(len, of_ranks)) // micro_batch_size)
    smallest = min(map(len, of_ranks)) // micro_batch_multiple * micro_batch_multiple
    parts = min(-(-most // micro_batch_multiple) * micro_batch_multiple, smallest)
    return StepPlan(tuple(tuple(_split_evenly(samples, parts)) for samples in of_ranks))


def _split_evenly(items: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    edges = [len(items) * part // parts for part in range(parts + 1)]
    return [items[begin:end] for begin, end in pairwise(edges)]


def _check_samples(lengths: Sequence[int], dp_size: int, micro_batch_multiple: int) -> None:
    if dp_size < 1 or micro_batch_multiple < 1:
        raise ValueError(f"dp_size {dp_size} and micro_batch_multiple {micro_batch_multiple} must be at least 1")
    needed = dp_size * micro_batch_multiple
    if len(lengths) < needed:
        pipeline = (
            "" if micro_batch_multiple == 1 else f" times {micro_batch_multiple} micro batches (virtual pipeline)"
        )
        raise ValueError(
            f"{len(lengths)} completions in a step are too few for {dp_size} data-parallel ranks{pipeline}: set "
            f"--global_batch_size to at least {needed}, or use fewer data-parallel ranks"
        )
    if min(lengths) < 1:
        raise ValueError(f"completion {min(range(len(lengths)), key=lengths.__getitem__)} of the step has no tokens")


def _fewest_micro_batches(sizes: Sequence[int], room: int) -> int:
    """How many best-fit decreasing opens: each size goes where it leaves the least room."""
    rooms: list[int] = []
    for size in sizes:
        at = bisect_left(rooms, size)
        insort(rooms, (rooms.pop(at) if at < len(rooms) else room) - size)
    return len(rooms)


def _deal_within_budget(
    order: Sequence[int], sizes: Sequence[int], work: Sequence[float], room: int, ranks: int, count: int
) -> list[list[int]]:
    """Equal work where that leaves room for all samples, else the small ones fill gaps, else the tightest packing."""
    for evenly in (len(order), len(order) // 2):
        batches = _deal(order, sizes, work, room, ranks, count // ranks, evenly)
        if batches is not None:
            return batches
    tightest = _deal(order, sizes, work, room, 1, count, evenly=0)
    assert tightest is not None, "one rank packs as _fewest_micro_batches does"
    return _deal_whole(tightest, work, ranks)


def _deal_whole(batches: Sequence[list[int]], work: Sequence[float], ranks: int) -> list[list[int]]:
    """Micro batches as they are, the same number to every rank."""
    totals = [sum(work[i] for i in batch) for batch in batches]
    order = sorted(range(len(batches)), key=totals.__getitem__, reverse=True)
    dealt = _deal(order, [1] * len(batches), totals, 1, ranks, len(batches) // ranks, evenly=len(batches))
    assert dealt is not None
    return [batches[b] for (b,) in dealt]


def _deal(
    order: Sequence[int],
    sizes: Sequence[int],
    work: Sequence[float],
    room: int,
    ranks: int,
    per_rank: int,
    evenly: int,
) -> list[list[int]] | None:
    """Items in `order` to the rank with the least work; None if one finds no room. Returns `per_rank` bins a rank.

    Within the rank, the first `evenly` items go to the bin with the least work that has room, the others where they
    leave the least room. No bin stays empty.
    """
    bins: list[list[int]] = [[] for _ in range(ranks * per_rank)]
    free = [room] * len(bins)
    least_work = [(0.0, rank) for rank in range(ranks)]
    # Bins of each rank, sorted by work or, later, by room.
    bins_of: list[list[tuple[float, int]]] = [
        [(0.0, rank * per_rank + b) for b in range(per_rank)] for rank in range(ranks)
    ]
    empty, smallest = len(bins), min(sizes)
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


def zigzag_positions(lengths: Sequence[int], cp_rank: int, cp_size: int) -> list[int]:
    """Packed positions that a context-parallel rank holds, in its order.

    Of the 2 * CP equal pieces of a sequence, rank r holds pieces r and 2 * CP - 1 - r: with a causal mask every rank
    then has the same work.
    """
    if cp_size == 1:
        return list(range(sum(lengths)))
    positions: list[int] = []
    start = 0
    for length in lengths:
        piece = length // (2 * cp_size)
        for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
            positions.extend(range(start + index * piece, start + (index + 1) * piece))
        start += length
    return positions
