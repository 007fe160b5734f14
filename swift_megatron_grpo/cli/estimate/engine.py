"""Estimate what vLLM's share of a GPU holds: weights, and the cache of keys and values. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

_BESIDE_BYTES = 2.0e9  # activations of its largest batch, CUDA graphs, sampler: what vLLM's profile takes off
_MOST_UTILIZATION = 0.9
_MOST_RANKS = 8  # of one machine


@dataclass(frozen=True, slots=True)
class Engine:
    """A vLLM engine in the training processes."""

    weight_bytes: float  # of the whole model
    cache_bytes_per_token: float  # of all layers, on one rank that has all heads
    key_heads: int  # ranks beyond their number keep copies
    longest: int  # tokens of a sequence, at most
    ranks: int  # --vllm_tensor_parallel_size
    utilization: float
    given_cache: float | None = None  # bytes: kv_cache_memory_bytes of --vllm_engine_kwargs

    def weights(self) -> float:
        """Return the bytes of the weights on one GPU."""
        return self.weight_bytes / self.ranks

    def memory(self, gpu_bytes: float) -> float:
        """Return the bytes of one GPU that it takes while it is awake."""
        if self.given_cache is not None:
            return self.weights() + self.given_cache + _BESIDE_BYTES
        return self.utilization * gpu_bytes

    def cache(self, gpu_bytes: float) -> float:
        """Return the bytes for keys and values on one GPU; negative if the weights do not fit."""
        return self.memory(gpu_bytes) - self.weights() - _BESIDE_BYTES

    def sequences(self, gpu_bytes: float, length: float) -> int:
        """Return how many sequences of this length the cache holds at one time."""
        per_token = self.cache_bytes_per_token / min(self.ranks, self.key_heads)
        return max(0, math.floor(self.cache(gpu_bytes) / (per_token * length))) if per_token else 0

    def fits(self, gpu_bytes: float) -> bool:
        return self.sequences(gpu_bytes, self.longest) >= 1


def engines_that_fit(engine: Engine, gpu_bytes: float, ranks: int) -> Iterator[tuple[str, Engine]]:
    """Yield flags with which the longest sequence fits, the nearest first: a larger share, then more ranks."""
    for percent in range(math.ceil(engine.utilization * 10) * 10, round(_MOST_UTILIZATION * 100) + 1, 10):
        larger = replace(engine, utilization=percent / 100)
        if percent / 100 > engine.utilization and larger.fits(gpu_bytes):
            yield f"--vllm_gpu_memory_utilization {percent / 100:g}", larger
            break
    size = engine.ranks * 2
    while size <= min(_MOST_RANKS, ranks):
        divided = replace(engine, ranks=size)
        if ranks % size == 0 and divided.fits(gpu_bytes):
            yield f"--vllm_tensor_parallel_size {size}", divided
            break
        size *= 2
