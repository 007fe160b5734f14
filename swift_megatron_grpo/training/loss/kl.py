"""Estimates of KL(pi || reference) from tokens that pi sampled: http://joschu.net/blog/kl-approx.html."""

from __future__ import annotations

from collections.abc import Callable

import torch

from swift_megatron_grpo.settings.losses import KlEstimator


def k1(logprobs: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Compute log(pi / ref): unbiased, often negative. For rewards only: in a loss its gradient is 0 on average."""
    return logprobs - base


def k2(logprobs: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Compute 1/2 log(pi / ref)^2: biased, but its gradient is the gradient of the KL."""
    return 0.5 * (logprobs - base).square()


def k3(logprobs: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Compute ref / pi - 1 - log(ref / pi): unbiased, never negative, low variance. GRPO, 2402.03300.

    Clamped as in ms-swift, so that one token cannot dominate the step.
    """
    log_ratio = (base - logprobs).clamp(-20, 20)
    return (log_ratio.exp() - log_ratio - 1).clamp(-10, 10)


ESTIMATORS: dict[KlEstimator, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "abs": lambda logprobs, base: (logprobs - base).abs(),
    "k2": k2,
    "k3": k3,
}
