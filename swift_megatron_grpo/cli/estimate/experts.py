"""Estimate how many rows of experts leave a GPU, and how many the fullest one has. Pure Python.

A token's experts are drawn at random, each with a load of its own. How much loads differ was fitted to the memory of
adapters of Qwen3-30B-A3B, 128 experts, on two and four H200. Its routers had random weights (the loads of a layer:
benchmarks/random_routers.py); training balances loads.
"""

from __future__ import annotations

from math import comb, sqrt

SPREAD = 0.9  # of the loads of single experts, relative to their mean


def share_of_fullest(experts: int, ranks: int) -> float:
    """Return the rows of the fullest rank, relative to the mean: 1 without expert parallelism.

    The loads of a rank's experts add up, so the more experts a rank has, the more even ranks are.
    """
    return 1.0 if ranks == 1 or not experts else 1 + SPREAD * sqrt((ranks - 1) / experts)


def rows_that_leave(experts: int, taken: int, ranks: int) -> float:
    """Return on how many other ranks a token has experts, of which it takes `taken`."""
    none_there = comb(experts - experts // ranks, taken) / comb(experts, taken)
    return (ranks - 1) * (1 - none_there)
