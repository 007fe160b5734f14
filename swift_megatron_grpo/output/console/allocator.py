"""Counts how often PyTorch's allocator had to give its cache back to the GPU, and warns of it once.

Each time it waits for the GPU, and allocates again what it needs. A run close to the limit of a GPU does so in
every step if its micro batches differ in length, without an error.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
SEGMENTS = "expandable_segments:True"


def retries_so_far() -> int:
    """Return the number on this GPU since the start of the process, 0 before it uses the GPU."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


class AllocatorRetries:
    def __init__(self, read: Callable[[], int] = retries_so_far) -> None:
        self._read, self._seen = read, read()
        self._logs, self._has_warned = 0, False

    def since_last_log(self) -> int:
        before, self._seen = self._seen, self._read()
        return self._seen - before

    def warn(self, retries: int, budget: str) -> None:
        """Warn once, but not of the first step, which allocates all for the first time. `budget`: flag and value."""
        self._logs += 1
        if retries and self._logs > 1 and not self._has_warned:
            self._has_warned = True
            has_segments = any(SEGMENTS in os.environ.get(name, "") for name in SETTINGS)
            remedy = f"lower {budget}" if has_segments else f"set {SETTINGS[1]}={SEGMENTS}, or lower {budget}"
            logger.warning(
                f"PyTorch's allocator found no room {retries} times since the last log, gave its cache back to the GPU "
                f"and waited for it, which makes steps slower: {remedy}"
            )
