"""From values per token to the micro batch's share of one number for the whole step. Shares of all micro batches and
ranks add up, because the divisors are counts of the step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from swift_megatron_grpo.config import LossConfig
from swift_megatron_grpo.packing.collate import MicroBatch
from swift_megatron_grpo.training.loss.rows import Rows

Average = Callable[[torch.Tensor, Rows, MicroBatch, LossConfig], torch.Tensor]


def over_sequences(per_token: torch.Tensor, rows: Rows, batch: MicroBatch, config: LossConfig) -> torch.Tensor:
    """1/S sum_s 1/|s| sum_t x_t: every sequence weighs the same. GRPO, https://arxiv.org/abs/2402.03300."""
    return rows.mean(per_token).sum() / max(batch.step.loss_sequences, 1)


def over_tokens(per_token: torch.Tensor, rows: Rows, batch: MicroBatch, config: LossConfig) -> torch.Tensor:
    """1/N sum_s sum_t x_t: every token weighs the same. DAPO, https://arxiv.org/abs/2503.14476."""
    return per_token.sum() / max(batch.step.loss_tokens, 1)


def over_budget(per_token: torch.Tensor, rows: Rows, batch: MicroBatch, config: LossConfig) -> torch.Tensor:
    """1/(S L) sum_s sum_t x_t with L = --max_completion_length: a token weighs the same however long its completion
    became. Dr. GRPO, https://arxiv.org/abs/2503.20783."""
    assert config.max_completion_length is not None  # make_loss has seen to it
    return per_token.sum() / (max(batch.step.loss_sequences, 1) * config.max_completion_length)


# ---- of the log: over what is trained, --overlong_filter or not


def token_mean(per_token: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    return per_token.detach().sum(dtype=torch.float32) / max(batch.step.tokens, 1)


def sequence_mean(per_sequence: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """[s]; sequences without trained tokens do not count."""
    return (per_sequence.detach() * (batch.lengths > 0)).sum() / max(batch.step.sequences, 1)


def sequence_max(per_sequence: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """[s] -> the largest, -inf if no sequence is trained. Not a share: the engine takes the largest of all."""
    return per_sequence.detach().masked_fill(batch.lengths == 0, -torch.inf).max()


def sequence_min(per_sequence: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    return per_sequence.detach().masked_fill(batch.lengths == 0, torch.inf).min()
