"""KL(pi || reference) from tokens that pi sampled, http://joschu.net/blog/kl-approx.html, and its coefficient beta."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from swift_megatron_grpo.settings.losses import Kl, KlEstimator
from swift_megatron_grpo.types import TokenValues

_LARGEST_ERROR = 0.2
_FILE = "kl_beta.json"  # in a checkpoint's folder


def k1(logprobs: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Compute log(pi / ref): unbiased, often negative. For rewards only: in a loss its gradient is 0 on average."""
    return logprobs - base


def k2(logprobs: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Compute 1/2 log(pi / ref)^2: biased, but its gradient is the gradient of the KL."""
    return 0.5 * (logprobs - base).square()


def k3(logprobs: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Compute ref / pi - 1 - log(ref / pi), clamped as in ms-swift: unbiased, never negative. GRPO, 2402.03300."""
    log_ratio = (base - logprobs).clamp(-20, 20)
    return (log_ratio.exp() - log_ratio - 1).clamp(-10, 10)


ESTIMATORS: dict[KlEstimator, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "abs": lambda logprobs, base: (logprobs - base).abs(),
    "k2": k2,
    "k3": k3,
}


@dataclass
class KlController:
    """The adaptive controller of https://arxiv.org/abs/1909.08593:

        beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) * completions / horizon)

    with KL per token, as in verl and ROLL. Without a target, beta is constant.
    """

    value: float
    config: Kl

    @property
    def adapts(self) -> bool:
        return self.config.kl_target is not None

    def save(self, folder: str) -> None:
        if self.adapts:
            Path(folder, _FILE).write_text(json.dumps({"beta": self.value}), encoding="utf-8")

    def restore(self, folders: Iterable[str]) -> None:
        """Restore an adapted beta from the first folder that has it, so that a resumed run continues with it."""
        for folder in folders:
            if self.adapts and Path(folder, _FILE).is_file():
                self.value = float(json.loads(Path(folder, _FILE).read_text(encoding="utf-8"))["beta"])
                return

    def observe(self, kl_per_token: float, completions: int) -> None:
        target = self.config.kl_target
        if target is not None:
            error = min(max(kl_per_token / target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
            self.value *= 1 + error * completions / self.config.kl_horizon


def divergences(
    policy: Mapping[int, TokenValues], reference: Mapping[int, TokenValues], estimator: KlEstimator
) -> dict[int, float]:
    """Return the KL of each completion that this rank has, summed over its tokens."""
    sums = {}
    for index, values in policy.items():
        logprobs = torch.tensor([values.logprobs, reference[index].logprobs], dtype=torch.float64)
        sums[index] = float(ESTIMATORS[estimator](*logprobs).sum())
    return sums
