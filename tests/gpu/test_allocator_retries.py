"""PyTorch counts how often its allocator gives its cache back to the GPU."""

from __future__ import annotations

import pytest
import torch

from swift_megatron_grpo.output.console.callback import AllocatorRetries

pytestmark = pytest.mark.gpu
GIB = 2**30


def test_an_allocation_that_fits_only_without_the_cache_counts() -> None:
    retries = AllocatorRetries()
    torch.cuda.set_per_process_memory_fraction(4 * GIB / torch.cuda.get_device_properties(0).total_memory)
    try:
        small = [torch.empty(GIB // 2, dtype=torch.uint8, device="cuda") for _ in range(6)]
        del small  # 3 GiB are in the cache, in blocks that are too small
        large = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
        assert large.is_cuda and retries.since_last_log() > 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
