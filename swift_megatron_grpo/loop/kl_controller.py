"""The KL coefficient beta, fixed or adaptive, and the KL of whole completions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from swift_megatron_grpo.settings.losses import Kl, KlEstimator
from swift_megatron_grpo.training.loss.kl import ESTIMATORS
from swift_megatron_grpo.types import TokenValues

_LARGEST_ERROR = 0.2
_FILE = "kl_beta.json"  # in a checkpoint's folder


class KlController:
    """The adaptive controller of https://arxiv.org/abs/1909.08593:

        beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) * completions / horizon)

    with KL per token, as in verl and ROLL. Without a target, beta is constant.
    """

    def __init__(self, value: float, config: Kl) -> None:
        self.value = value
        self._target = config.kl_target
        self._horizon = config.kl_horizon

    @property
    def adapts(self) -> bool:
        return self._target is not None

    def save(self, folder: str) -> None:
        Path(folder, _FILE).write_text(json.dumps({"beta": self.value}), encoding="utf-8")

    def restore(self, folders: Iterable[str | None]) -> None:
        """Restore beta from the first folder that has it, so that a resumed run continues with the adapted value."""
        for folder in folders:
            if folder is not None and Path(folder, _FILE).is_file():
                self.value = float(json.loads(Path(folder, _FILE).read_text(encoding="utf-8"))["beta"])
                return

    def observe(self, kl_per_token: float, completions: int) -> None:
        if self._target is not None:
            error = min(max(kl_per_token / self._target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
            self.value *= 1 + error * completions / self._horizon


def divergences(
    policy: Mapping[int, TokenValues], reference: Mapping[int, TokenValues], estimator: KlEstimator
) -> dict[int, float]:
    """Return the KL of each completion that this rank has, summed over its tokens."""
    return {
        index: _divergence(values.logprobs, reference[index].logprobs, estimator) for index, values in policy.items()
    }


def _divergence(policy: Sequence[float], reference: Sequence[float], estimator: KlEstimator) -> float:
    logprobs = torch.tensor([policy, reference], dtype=torch.float64)
    return float(ESTIMATORS[estimator](logprobs[0], logprobs[1]).sum())
