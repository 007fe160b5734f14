"""The memory that a sleeping vLLM has yet to take is all of its pool, or its cache once the weights are awake."""

from __future__ import annotations

from swift_megatron_grpo.generation.local.engine import GIB, bytes_to_wake

POOL = [("weights", 61 * GIB), ("kv_cache", 6 * GIB), ("kv_cache", 2 * GIB), ("default", GIB)]


def test_everything_wakes_before_the_weight_sync_and_the_cache_after_it() -> None:
    assert bytes_to_wake(POOL, {"weights", "kv_cache"}, share=72 * GIB) == (70 + 2) * GIB
    assert bytes_to_wake(POOL, {"kv_cache"}, share=72 * GIB) == (8 + 2) * GIB


def test_activations_get_between_1_and_4_gib() -> None:
    assert bytes_to_wake(POOL, {"kv_cache"}, share=42 * GIB) == (8 + 1) * GIB
    assert bytes_to_wake(POOL, {"kv_cache"}, share=126 * GIB) == (8 + 4) * GIB
