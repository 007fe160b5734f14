"""The optimal token baseline against the formulas of its paper, written out token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swift_megatron_grpo.grading.token_baselines import energies, token_advantages


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_energies_are_squared_distances_from_the_policy(temperature: float) -> None:
    """They come from log-probs at two temperatures, without the probabilities of other tokens."""
    logits = 3 * torch.randn(40, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    tokens = torch.arange(40) % 11
    policy = (logits / temperature).softmax(-1)
    expected = (torch.nn.functional.one_hot(tokens, 11) - policy).square().sum(-1)
    at = [(logits / divisor).log_softmax(-1)[torch.arange(40), tokens] for divisor in (temperature, temperature / 2)]
    assert energies(at[0].tolist(), at[1].tolist()).tolist() == pytest.approx(expected.tolist(), abs=1e-12)


def formula(rewards: list[float], rows: list[list[float]], i: int, t: int) -> float:
    """Return R_i - B_t, and R_i for tokens that only the longest completion has."""
    reached = [k for k, row in enumerate(rows) if len(row) > t]
    if reached == [i]:
        return rewards[i]
    weights = {k: sum(rows[k][: t + 1]) for k in reached}
    return rewards[i] - sum(rewards[k] * weights[k] for k in reached) / (sum(weights.values()) + 1e-8)


@pytest.mark.parametrize("lengths", [[3, 5, 2, 9], [4, 4, 1, 0], [6, 6], [0, 0, 0], [7, 0, 0]])
def test_token_advantages_equal_the_formula(lengths: list[int]) -> None:
    generator = np.random.default_rng(7)
    rows = [generator.uniform(0, 2, length) for length in lengths]
    rewards = generator.normal(size=len(lengths)).tolist()
    lists = [row.tolist() for row in rows]
    expected = [[formula(rewards, lists, i, t) for t in range(length)] for i, length in enumerate(lengths)]
    for advantages, wanted in zip(token_advantages(rewards, rows), expected, strict=True):
        assert advantages == pytest.approx(wanted, abs=1e-9)


def test_equal_energies_give_the_mean_of_the_group() -> None:
    advantages = token_advantages([1.0, 0.0, 0.5], [np.full(4, 0.3)] * 3)
    assert [row[2] for row in advantages] == pytest.approx([0.5, -0.5, 0.0], abs=1e-7)
