"""Noise of seed and position follows the law of samples, and is independent between neighbours."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from vllm.platforms import current_platform

from swift_megatron_grpo.generation.vllm.position_noise import Integers, mixed, noisy_argmax

current_platform.import_kernels()  # those that this CPU can run
DRAWS = 60_000
LOGITS = torch.tensor([1.3, 0.2, -0.7, 2.0, float("-inf"), -1.5, 0.9])
PROBABILITIES = LOGITS.double().softmax(0)


def drawn(seeds: Integers, positions: Integers) -> torch.Tensor:
    return noisy_argmax(LOGITS.expand(len(seeds), -1).contiguous(), seeds, positions)


def deviations(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Return by how many standard deviations chi square is off its mean."""
    possible = expected > 0
    assert counts[~possible].sum() == 0
    score = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    freedom = int(possible.sum()) - 1
    return (score - freedom) / math.sqrt(2 * freedom)


PAIRS = {
    "positions of one seed": (np.full(DRAWS, 7), np.arange(DRAWS)),
    "seeds at one position": (np.arange(DRAWS), np.full(DRAWS, 100)),
    "large seeds": (2**61 + 3 * np.arange(DRAWS), np.full(DRAWS, 5)),
    "negative seeds": (-np.arange(DRAWS), np.full(DRAWS, 5)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_samples_follow_softmax(name: str) -> None:
    seeds, positions = PAIRS[name]
    counts = torch.bincount(drawn(seeds, positions), minlength=len(LOGITS)).double()
    assert abs(deviations(counts, DRAWS * PROBABILITIES)) < 4.5


NEIGHBOURS = {"next position": (0, 1), "next seed": (1, 0), "next seed, position before": (1, -1),
              "seed of its own position": (17, -17)}  # fmt: skip


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_are_independent(name: str) -> None:
    of_seed, of_position = NEIGHBOURS[name]
    generator = np.random.default_rng(0)
    seeds, positions = generator.integers(0, 4000, DRAWS), generator.integers(20, 4000, DRAWS)
    one, other = drawn(seeds, positions), drawn(seeds + of_seed, positions + of_position)
    counts = torch.bincount(one * len(LOGITS) + other, minlength=len(LOGITS) ** 2).double()
    expected = DRAWS * torch.outer(PROBABILITIES, PROBABILITIES).flatten()
    assert abs(deviations(counts, expected)) < 4.5


def test_no_two_pairs_of_a_run_share_their_noise() -> None:
    seeds, positions = (grid.ravel() for grid in np.meshgrid(np.arange(500), np.arange(500)))
    found = mixed(seeds, positions)
    assert len(np.unique(found)) == 500 * 500
    assert found.min() >= 0


def test_a_row_has_the_same_token_wherever_it_is_in_a_batch() -> None:
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
    seeds, positions = np.arange(64) % 5, np.arange(64) % 7
    together = noisy_argmax(logits, seeds, positions)
    order = np.random.default_rng(1).permutation(64)
    assert torch.equal(together[order], noisy_argmax(logits[order].contiguous(), seeds[order], positions[order]))
    for row in range(0, 64, 9):
        [alone] = noisy_argmax(logits[row : row + 1], seeds[row : row + 1], positions[row : row + 1])
        assert alone == together[row]
