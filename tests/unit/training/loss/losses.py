"""Random steps, and a runner that computes a loss over them with any packing into micro batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from swift_megatron_grpo.packing.collate import MicroBatch, collate, count
from swift_megatron_grpo.packing.plan import Alignment
from swift_megatron_grpo.settings.losses import LossConfig
from swift_megatron_grpo.training.loss import TokenOutput, make_loss
from swift_megatron_grpo.types import Sample

CPU = torch.device("cpu")
GROUP = 4


@dataclass(frozen=True)
class Step:
    """Samples, with the log-probs and entropies of the current policy."""

    samples: list[Sample]
    logprobs: list[list[float]]
    entropies: list[list[float]]


@dataclass
class Result:
    """Result of a whole step, summed over micro batches as in the engine."""

    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    gradients: dict[int, list[float]] = field(default_factory=dict)  # with respect to the log-probs, by sample


def make_step(lengths: Sequence[int], seed: int = 0, drift: float = 0.3, group: int = GROUP) -> Step:
    """Return an off-policy step: old, reference and rollout log-probs are the current ones plus noise (`drift`)."""
    rng = random.Random(seed)
    now = [[-0.01 - 3 * rng.random() for _ in range(length)] for length in lengths]
    entropies = [[3 * rng.random() for _ in range(length)] for length in lengths]

    def noisy(values: list[float], size: float) -> list[float]:
        return [value + rng.gauss(0, size) for value in values]

    samples = [
        Sample(
            tokens=[1] * (2 + len(values)),
            completion_mask=[False] * 2 + [True] * len(values),
            advantage=rng.gauss(0, 1),
            group=i // group,
            old_logprobs=noisy(values, drift),
            ref_logprobs=noisy(values, drift),
            rollout_logprobs=noisy(values, drift),
        )
        for i, values in enumerate(now)
    ]
    return Step(samples, now, entropies)


def run(step: Step, config: LossConfig, micro_batches: Sequence[Sequence[int]] | None = None) -> Result:
    micro_batches = [range(len(step.samples))] if micro_batches is None else micro_batches
    result = Result()
    normalisers = count(step.samples)
    for indices in micro_batches:
        batch: MicroBatch = collate(step.samples, list(indices), normalisers, Alignment(1, 1), 0, 1, CPU)
        logprobs = torch.tensor([v for i in indices for v in step.logprobs[i]], requires_grad=True)
        entropy = torch.tensor([v for i in indices for v in step.entropies[i]])
        value, metrics = make_loss(config)(batch, TokenOutput(logprobs, entropy))
        value.backward()
        result.loss += value.item()
        add(result.metrics, {name: share.item() for name, share in metrics.items()})
        assert logprobs.grad is not None
        by_sample = logprobs.grad.split([len(step.logprobs[i]) for i in indices])
        result.gradients |= {i: gradient.tolist() for i, gradient in zip(indices, by_sample, strict=True)}
    return result


def add(metrics: dict[str, float], shares: dict[str, float]) -> None:
    """Add shares to metrics as the engine does."""
    for name, share in shares.items():
        if name in metrics:
            combine = max if name.endswith("_max") else min if name.endswith("_min") else lambda a, b: a + b
            share = combine(metrics[name], share)
        metrics[name] = share
