"""REAL, https://arxiv.org/abs/2602.05630: rewards as labels, a classification loss over the completions of a prompt."""

from __future__ import annotations

import torch

from swift_megatron_grpo.config import LossConfig
from swift_megatron_grpo.training.loss.terms import Terms


def real(terms: Terms, kept: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Share of the mean over the step's groups of

        log(1 + sum_{negative} exp(S / tau)) + log(1 + sum_{positive} exp(-S / tau))

    with S the mean log-ratio of a completion, positive where A > 0. A group without both kinds contributes 0. A group
    must lie in one micro batch whole. `kept`: [s] which completions take part; ms-swift lets the others take part with
    S = 0.
    """
    batch, rows = terms.batch, terms.rows
    scores = rows.mean(terms.log_ratio) / config.real_tau  # [s]
    labels = rows.mean(terms.advantages)  # [s]
    positive, negative = kept & (labels > 0), kept & (labels <= 0)

    member = batch.groups[None] == torch.arange(batch.num_groups, device=scores.device)[:, None]  # [groups, s]
    loss = _log_one_plus(scores, member & negative) + _log_one_plus(-scores, member & positive)  # [groups]
    both = (member & positive).any(1) & (member & negative).any(1)
    return torch.where(both, loss, 0.0).sum() / max(batch.step.loss_groups, 1)


def _log_one_plus(scores: torch.Tensor, member: torch.Tensor) -> torch.Tensor:
    """[s], [groups, s] -> log(1 + sum of exp(score) of the members): [groups]"""
    chosen = scores[None].masked_fill(~member, -torch.inf)
    one = scores.new_zeros(len(member), 1)
    return torch.cat([chosen, one], 1).logsumexp(1)
