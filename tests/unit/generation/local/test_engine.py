"""Memory of vLLM in the training processes: what it has yet to allocate when it wakes, and torch's cache."""

from __future__ import annotations

import pytest
import torch
from vllm.device_allocator import cumem

from swift_megatron_grpo.generation.local.engine import GIB, bytes_to_wake, keep_memory_cache

POOL = [("weights", 61 * GIB), ("kv_cache", 6 * GIB), ("kv_cache", 2 * GIB), ("default", GIB)]


def test_everything_wakes_before_the_weight_sync_and_the_cache_after_it() -> None:
    assert bytes_to_wake(POOL, {"weights", "kv_cache"}, share=72 * GIB) == (70 + 2) * GIB
    assert bytes_to_wake(POOL, {"kv_cache"}, share=72 * GIB) == (8 + 2) * GIB


def test_activations_get_between_1_and_4_gib() -> None:
    assert bytes_to_wake(POOL, {"kv_cache"}, share=42 * GIB) == (8 + 1) * GIB
    assert bytes_to_wake(POOL, {"kv_cache"}, share=126 * GIB) == (8 + 4) * GIB


def test_only_vllms_allocator_keeps_torchs_memory_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[str] = []
    monkeypatch.setattr(cumem, "torch", torch)  # restored after the test
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("cuda"))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append("accelerator"))
    keep_memory_cache()
    seen = vars(cumem)["torch"]
    seen.cuda.empty_cache()
    seen.accelerator.empty_cache()
    assert emptied == [] and seen.uint8 is torch.uint8 and seen.cuda.memory is torch.cuda.memory
    torch.cuda.empty_cache()
    assert emptied == ["cuda"]
