"""REAL, https://arxiv.org/abs/2602.05630: rewards as labels, a classification loss over the completions of a prompt."""

from __future__ import annotations

import torch

from swift_megatron_grpo.settings.config import LossConfig
from swift_megatron_grpo.training.loss.terms import Terms


def real(terms: Terms, kept: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Compute the micro batch's share of the mean over the step's groups.

    The value of a group is

        log(1 + sum_{negative} exp(S / tau)) + log(1 + sum_{positive} exp(-S / tau))

    with S the mean log-ratio of a completion; completions with A > 0 are positive. A group without both kinds
    contributes 0. All completions of a group must be in one micro batch. `kept`: [s], True for completions to include;
    ms-swift includes the others with S = 0.
    """
    batch = terms.batch
    rows = terms.rows
    scores = rows.mean(terms.log_ratio) / config.real_tau  # [s]
    labels = rows.mean(terms.advantages)  # [s]
    positive = kept & (labels > 0)
    negative = kept & (labels <= 0)

    member = batch.groups[None] == torch.arange(batch.num_groups, device=scores.device)[:, None]  # [groups, s]
    loss = _log_one_plus(scores, member & negative) + _log_one_plus(-scores, member & positive)  # [groups]
    both = (member & positive).any(1) & (member & negative).any(1)
    return torch.where(both, loss, 0.0).sum() / max(batch.step.loss_groups, 1)


def _log_one_plus(scores: torch.Tensor, member: torch.Tensor) -> torch.Tensor:
    """Compute log(1 + sum of exp(score) over the members): [s], [groups, s] -> [groups]."""
    chosen = scores[None].masked_fill(~member, -torch.inf)
    one = scores.new_zeros(len(member), 1)
    return torch.cat([chosen, one], 1).logsumexp(1)
