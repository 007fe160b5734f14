"""The losses: one pure function each, looked up by name.

A loss sees one micro batch and returns (loss, metrics). Both are the micro batch's share of a value of the whole
optimizer step: shares of all micro batches and ranks add up, so neither depends on how samples were packed or dealt.
No host sync, no collective. m: trained tokens of the micro batch, s: its sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from swift_megatron_grpo.config import LossConfig
from swift_megatron_grpo.packing.collate import MicroBatch

Metrics = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What the model says of the trained tokens."""

    logprobs: torch.Tensor  # [m] fp32, with gradient
    entropy: torch.Tensor | None  # [m] fp32


LossFunction = Callable[[MicroBatch, TokenOutput], tuple[torch.Tensor, Metrics]]


def make_loss(config: LossConfig) -> LossFunction:
    return partial(LOSSES[config.name], config=config)


def grpo(batch: MicroBatch, output: TokenOutput, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """Group relative policy optimization, https://arxiv.org/abs/2402.03300, eq. 3.

    loss = - 1/S sum_s 1/|s| sum_t [ min(r_t A_s, clip(r_t, 1 - epsilon, 1 + epsilon_high) A_s) - beta KL_t ]
    with r_t = pi(t) / pi_old(t) and KL_t = pi_ref/pi - log(pi_ref/pi) - 1; S counts the sequences of the step.
    """
    old = output.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    log_ratio = output.logprobs - old
    policy_loss, clipped = clipped_surrogate(log_ratio, batch.advantages, config.epsilon_low, config.epsilon_high)
    kl = None if batch.ref_logprobs is None else k3(batch.ref_logprobs, output.logprobs)

    per_token = policy_loss if kl is None else policy_loss + config.beta * kl
    loss = sequence_mean(per_token, batch)
    metrics = {
        "actor/pg_loss": sequence_mean(policy_loss, batch).detach(),
        **ratio_metrics(log_ratio.detach(), clipped, batch),
        **rollout_metrics(output.logprobs.detach(), batch),
    }
    if kl is not None:
        metrics["kl"] = token_mean(kl.detach(), batch)
    return loss, metrics


LOSSES: dict[str, Callable[..., tuple[torch.Tensor, Metrics]]] = {"grpo": grpo}


@dataclass(frozen=True, slots=True)
class Clipped:
    low: torch.Tensor  # [m] bool: the ratio is below the region and the advantage is negative
    high: torch.Tensor  # [m] bool: above it and positive


def clipped_surrogate(
    log_ratio: torch.Tensor, advantages: torch.Tensor, epsilon_low: float, epsilon_high: float
) -> tuple[torch.Tensor, Clipped]:
    """-min(r A, clip(r) A) per token, and where clipping took the gradient away."""
    ratio = log_ratio.exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages)
    clipped = Clipped(
        low=(ratio < 1 - epsilon_low) & (advantages < 0), high=(ratio > 1 + epsilon_high) & (advantages > 0)
    )
    return loss, clipped


def k3(logprobs: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimate of KL(base || other) on tokens drawn from base: never negative, low variance.

    Bounded as in ms-swift, so that one token cannot swamp the step.
    """
    log_ratio = (logprobs - base).clamp(-20, 20)
    return (log_ratio.exp() - log_ratio - 1).clamp(-10, 10)


def sequence_mean(per_token: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Share of: mean over the step's sequences of the mean over each one's tokens."""
    weights = (1.0 / (batch.lengths * max(batch.step.sequences, 1))).repeat_interleave(
        batch.lengths, output_size=per_token.shape[0]
    )
    return (per_token * weights).sum()


def token_mean(per_token: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Share of: mean over the step's trained tokens."""
    return per_token.sum(dtype=torch.float32) / max(batch.step.tokens, 1)


def ratio_metrics(log_ratio: torch.Tensor, clipped: Clipped, batch: MicroBatch) -> Metrics:
    low, high = token_mean(clipped.low, batch), token_mean(clipped.high, batch)
    return {
        "actor/approxkl": token_mean(0.5 * log_ratio.square(), batch),
        "actor/clipfrac": low + high,
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
    }


def rollout_metrics(logprobs: torch.Tensor, batch: MicroBatch) -> Metrics:
    """How far the engine that generated is from the policy that trains: k3 per token."""
    if batch.rollout_logprobs is None:
        return {}
    return {"rollout/k3_kl": token_mean(k3(logprobs, batch.rollout_logprobs), batch)}
