"""Steps made up of random numbers, and what a loss makes of them when they are packed in different ways."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from swift_megatron_grpo.config import LossConfig
from swift_megatron_grpo.packing.collate import MicroBatch, collate, count
from swift_megatron_grpo.packing.plan import Alignment
from swift_megatron_grpo.training.loss import TokenOutput, make_loss
from swift_megatron_grpo.types import Sample

CPU = torch.device("cpu")
GROUP = 4


@dataclass(frozen=True)
class Step:
    """Samples, and what the policy says of their tokens now."""

    samples: list[Sample]
    logprobs: list[list[float]]
    entropies: list[list[float]]


@dataclass
class Result:
    """Of a whole step: summed over micro batches, as the engine does."""

    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    gradients: dict[int, list[float]] = field(default_factory=dict)  # of the log-probs, by sample


def make_step(lengths: Sequence[int], seed: int = 0, drift: float = 0.3, group: int = GROUP) -> Step:
    """Off-policy by `drift`: old, reference and rollout log-probs are those of now with noise of this size."""
    rng = random.Random(seed)
    now = [[-0.01 - 3 * rng.random() for _ in range(length)] for length in lengths]
    entropies = [[3 * rng.random() for _ in range(length)] for length in lengths]

    def moved(values: list[float], by: float) -> list[float]:
        return [value + rng.gauss(0, by) for value in values]

    samples = [
        Sample(
            tokens=[1] * (2 + len(values)),
            completion_mask=[False] * 2 + [True] * len(values),
            advantage=rng.gauss(0, 1),
            group=i // group,
            old_logprobs=moved(values, drift),
            ref_logprobs=moved(values, drift),
            rollout_logprobs=moved(values, drift),
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
        value, found = make_loss(config)(batch, TokenOutput(logprobs, entropy))
        value.backward()
        result.loss += value.item()
        add(result.metrics, {name: share.item() for name, share in found.items()})
        assert logprobs.grad is not None
        parts = logprobs.grad.split([len(step.logprobs[i]) for i in indices])
        result.gradients |= {i: part.tolist() for i, part in zip(indices, parts, strict=True)}
    return result


def add(metrics: dict[str, float], shares: dict[str, float]) -> None:
    """As the engine does."""
    for name, share in shares.items():
        if name in metrics:
            combine = max if name.endswith("_max") else min if name.endswith("_min") else lambda a, b: a + b
            share = combine(metrics[name], share)
        metrics[name] = share
