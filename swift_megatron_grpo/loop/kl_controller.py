"""The KL coefficient beta, fixed or adaptive, and the KL of whole completions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from swift_megatron_grpo.settings.losses import Kl, KlEstimator
from swift_megatron_grpo.training.loss.kl import ESTIMATORS
from swift_megatron_grpo.types import TokenValues

_LARGEST_ERROR = 0.2
_FILE = "kl_beta.json"  # in a checkpoint's folder


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
