"""How many rows of logits exist at one time.

More rows make larger matrix products and fewer passes over the weight and its gradient; fewer rows take less memory.
"""

from __future__ import annotations

import math

import torch

# 4,352 rows of 152k bf16 logits: products of that size run at the GPU's full rate.
_CUDA_BYTES = 5 * 2**28
_CPU_BYTES = 2**26
_TILE = 128  # rows; what matrix products are cut into


def rows_per_chunk(rows: int, columns: int, dtype: torch.dtype, on_cuda: bool) -> int:
    """At least 1. Chunks of about equal size, so that the last one is not a product of a few rows."""
    if on_cuda:
        most = _CUDA_BYTES // (columns * dtype.itemsize) // _TILE * _TILE
        tile = _TILE
    else:
        most = _CPU_BYTES // (columns * torch.float32.itemsize)  # on the CPU, fp32 copies of bf16 logits exist as well
        tile = 1
    most = max(tile, most)
    count = max(1, math.ceil(rows / most))
    return max(1, math.ceil(math.ceil(rows / count) / tile) * tile)
