"""Chooses how many rows of logits exist at one time.

More rows mean larger matrix products and fewer passes over the weight and its gradient; fewer rows take less memory.
"""

from __future__ import annotations

import math

import torch

# 4,352 rows of 152k bf16 logits: matrix products of that size run at the GPU's full rate.
_CUDA_BYTES = 5 * 2**28
_CPU_BYTES = 2**28
_TILE = 128  # rows of the tiles into which a GPU cuts a matrix product


def rows_per_chunk(rows: int, columns: int, dtype: torch.dtype, on_cuda: bool) -> int:
    """Return the number of rows per chunk, at least 1.

    Chunks have about equal sizes, so that the last one is not a product of a few rows.
    """
    tile, budget = (_TILE, _CUDA_BYTES) if on_cuda else (1, _CPU_BYTES)
    most = max(tile, budget // (columns * dtype.itemsize) // tile * tile)
    equal = math.ceil(rows / max(1, math.ceil(rows / most)))
    return max(tile, math.ceil(equal / tile) * tile)
