"""Memory of a vLLM in the measured process, within what PyTorch counts as allocated.

vLLM takes the weights and the cache that it gives back in its sleep from a pool of PyTorch's, which counts them as
allocated in its sleep too.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch

_ALLOCATOR = "vllm.device_allocator.cumem"


def vllm_bytes() -> int | None:
    """Return the bytes of vLLM's pools, asleep or awake. None: there are none, as on a CPU or with --sleep_level 0."""
    if _ALLOCATOR not in sys.modules:  # no vLLM in this process
        return None
    allocator = sys.modules[_ALLOCATOR].CuMemAllocator.instance
    if allocator is None or not allocator.pointer_to_data:
        return None
    return bytes_at(allocator.pointer_to_data, torch.cuda.memory_snapshot())


def bytes_at(addresses: Container[int], segments: Iterable[Mapping[str, Any]]) -> int:
    """Return the bytes allocated in the segments of PyTorch's that begin at these addresses."""
    return sum(segment["allocated_size"] for segment in segments if segment["address"] in addresses)
