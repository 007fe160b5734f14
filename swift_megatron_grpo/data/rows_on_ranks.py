"""Work on every row of a dataset, distributed over the ranks: encoding prompts and opening images takes time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def on_all_ranks(work: Callable[[int], T], rows: int) -> list[T]:
    """Return the result for every row; rank r works on rows r, r + ranks, ... A dry run has one process."""
    if not dist.is_initialized():
        return [work(row) for row in range(rows)]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shares: list[list[T] | Exception] = [[]] * ranks
    share: list[T] | Exception
    try:
        share = [work(row) for row in range(rank, rows, ranks)]
    except Exception as error:  # a rank that left here would keep the others waiting
        share = error
    dist.all_gather_object(shares, share)
    for failed in shares:
        if isinstance(failed, Exception):
            raise failed
    results: list[Any] = [None] * rows
    for first, values in enumerate(shares):
        assert isinstance(values, list)
        results[first::ranks] = values
    return results
