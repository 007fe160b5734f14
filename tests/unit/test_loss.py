"""Losses against a transcription of the paper's formula in fp64, and their independence of packing."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_megatron_grpo.config import LossConfig
from swift_megatron_grpo.packing.collate import MicroBatch, collate, count
from swift_megatron_grpo.packing.plan import Alignment
from swift_megatron_grpo.training.loss import TokenOutput, make_loss
from swift_megatron_grpo.types import Sample

CPU = torch.device("cpu")
CONFIG = LossConfig(name="grpo", epsilon_low=0.2, epsilon_high=0.3, beta=0.1, temperature=1.0)


def make(lengths: list[int], seed: int = 0, off_policy: bool = True) -> tuple[list[Sample], list[list[float]]]:
    """Samples, and what the policy says of their tokens now."""
    rng = random.Random(seed)
    now = [[-3 * rng.random() for _ in range(length)] for length in lengths]
    samples = [
        Sample(
            tokens=[1] * (2 + length),
            completion_mask=[False] * 2 + [True] * length,
            advantage=rng.gauss(0, 1),
            old_logprobs=[value + rng.gauss(0, 0.3) for value in values] if off_policy else None,
            ref_logprobs=[value + rng.gauss(0, 0.3) for value in values],
        )
        for length, values in zip(lengths, now, strict=True)
    ]
    return samples, now


def formula(samples: list[Sample], now: list[list[float]]) -> float:
    """Eq. 3 of the paper, in Python floats."""
    total, sequences = 0.0, sum(len(values) > 0 for values in now)
    for sample, values in zip(samples, now, strict=True):
        for t, value in enumerate(values):
            old = value if sample.old_logprobs is None else sample.old_logprobs[t]
            ratio = math.exp(value - old)
            clipped = min(max(ratio, 1 - CONFIG.epsilon_low), 1 + CONFIG.epsilon_high)
            gap = (sample.ref_logprobs or [])[t] - value
            kl = math.exp(gap) - gap - 1
            surrogate = min(ratio * sample.advantage, clipped * sample.advantage)
            total -= (surrogate - CONFIG.beta * kl) / len(values)
    return total / sequences


def shares(
    samples: list[Sample], now: list[list[float]], micro_batches: list[list[int]]
) -> tuple[float, dict[str, float], list[list[float]]]:
    """Loss, metrics and gradient of a step, summed over micro batches as the engine does."""
    loss, metrics, grads = 0.0, {}, [[] for _ in samples]
    for indices in micro_batches:
        batch: MicroBatch = collate(samples, indices, count(samples), Alignment(1, 1), 0, 1, CPU)
        logprobs = torch.tensor([v for i in indices for v in now[i]], requires_grad=True)
        value, found = make_loss(CONFIG)(batch, TokenOutput(logprobs=logprobs, entropy=None))
        value.backward()
        loss += value.item()
        for name, share in found.items():
            metrics[name] = metrics.get(name, 0.0) + share.item()
        parts = logprobs.grad.split([len(now[i]) for i in indices])
        for index, part in zip(indices, parts, strict=True):
            grads[index] = part.tolist()
    return loss, metrics, grads


def test_grpo_is_the_papers_formula() -> None:
    samples, now = make([5, 1, 9, 3])
    loss, _, _ = shares(samples, now, [[0, 1, 2, 3]])
    assert loss == pytest.approx(formula(samples, now), rel=1e-6)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 8), min_size=2, max_size=7).filter(any), st.randoms(use_true_random=False))
def test_packing_does_not_matter(lengths: list[int], rng: random.Random) -> None:
    samples, now = make(lengths)
    order = list(range(len(samples)))
    rng.shuffle(order)
    cut = rng.randint(1, len(order) - 1)
    whole = shares(samples, now, [list(range(len(samples)))])
    parted = shares(samples, now, [order[:cut], order[cut:]])
    assert parted[0] == pytest.approx(whole[0], abs=1e-6)
    assert parted[1] == pytest.approx(whole[1], abs=1e-6)
    for mine, theirs in zip(parted[2], whole[2], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-7)


def test_on_policy_the_ratio_is_one_and_nothing_is_clipped() -> None:
    samples, now = make([4, 6], off_policy=False)
    _, metrics, grads = shares(samples, now, [[0, 1]])
    assert metrics["actor/clipfrac"] == 0 and metrics["actor/approxkl"] == 0
    expected = -sum(s.advantage for s in samples) / 2  # every ratio is 1, so the surrogate is the advantage
    assert metrics["actor/pg_loss"] == pytest.approx(expected, rel=1e-6)
    assert any(abs(g) > 0 for g in grads[0])  # but its gradient is the policy gradient


def test_clipping_is_counted_where_it_takes_the_gradient_away() -> None:
    high = Sample([1, 1, 1], [False, True, True], advantage=1.0, old_logprobs=[-2.0, -2.0])
    loss_config = LossConfig("grpo", 0.2, 0.2, 0.0, 1.0)
    batch = collate([high], [0], count([high]), Alignment(1, 1), 0, 1, CPU)
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)  # ratio e (clipped) and 1
    loss, metrics = make_loss(loss_config)(batch, TokenOutput(logprobs, None))
    loss.backward()
    assert metrics["clip_ratio/high_mean"].item() == 0.5 and metrics["clip_ratio/low_mean"].item() == 0
    assert logprobs.grad.tolist() == [0.0, pytest.approx(-0.5)]


def test_a_sample_without_trained_tokens_changes_nothing() -> None:
    samples, now = make([4, 3])
    with_empty = [*samples, Sample([1, 1], [False, False], advantage=9.0, old_logprobs=[], ref_logprobs=[])]
    assert shares(with_empty, [*now, []], [[0, 1, 2]])[0] == pytest.approx(shares(samples, now, [[0, 1]])[0], abs=1e-7)
