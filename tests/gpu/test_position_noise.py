"""Seeded rows on a GPU: the law of samples, no matter which batch a row is in, without waiting, and fast."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DRAWS = 60_000


@pytest.mark.parametrize("same", ["seed", "position"])
def test_samples_follow_softmax(same: str) -> None:
    from swift_megatron_grpo.generation.vllm.position_noise import noisy_argmax

    logits = torch.tensor([1.3, 0.2, -0.7, 2.0, float("-inf"), -1.5, 0.9])
    numbers = (np.full(DRAWS, 7), np.arange(DRAWS))
    seeds, positions = numbers if same == "seed" else numbers[::-1]
    sampled = noisy_argmax(logits.cuda().expand(DRAWS, -1).contiguous(), seeds, positions).cpu()
    counts, expected = torch.bincount(sampled, minlength=7).double(), DRAWS * logits.double().softmax(0)
    assert counts[4] == 0
    score = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum().item()
    assert abs(score - 5) < 4.5 * math.sqrt(10)


def test_a_row_has_the_same_token_wherever_it_is_in_a_batch() -> None:
    from swift_megatron_grpo.generation.vllm.position_noise import noisy_argmax

    logits = torch.randn(128, 151_936, device="cuda")
    seeds, positions = 2**40 + np.arange(128) % 9, np.arange(128) % 7
    together = noisy_argmax(logits, seeds, positions)
    order = np.random.default_rng(1).permutation(128)
    assert torch.equal(together[order], noisy_argmax(logits[order].contiguous(), seeds[order], positions[order]))
    for row in (0, 1, 60, 127):
        [alone] = noisy_argmax(logits[row : row + 1], seeds[row : row + 1], positions[row : row + 1])
        assert alone == together[row]


def test_128_rows_take_less_than_what_their_generators_took(record_property: Callable[[str, object], None]) -> None:
    """vLLM's generators took 10 microseconds a row. The host never waits for the GPU, which runs ahead."""
    from swift_megatron_grpo.generation.vllm.position_noise import noisy_argmax

    logits = torch.randn(128, 151_936, device="cuda")
    seeds, positions = np.arange(128), np.arange(128)
    noisy_argmax(logits, seeds, positions)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.set_sync_debug_mode("error")
    try:
        begin.record()  # type: ignore[no-untyped-call]
        for _ in range(20):
            noisy_argmax(logits, seeds, positions)
        end.record()  # type: ignore[no-untyped-call]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    milliseconds = begin.elapsed_time(end) / 20
    record_property("milliseconds", milliseconds)
    print(f"{milliseconds:.3f} ms for 128 rows")
    assert milliseconds < 0.5
