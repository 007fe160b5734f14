"""Averages values per token to the micro batch's share of one number for the whole step."""

from collections.abc import Callable

import torch

from swift_megatron_grpo.packing.collate import MicroBatch
from swift_megatron_grpo.settings.losses import LossConfig
from swift_megatron_grpo.training.loss.terms import Rows

Average = Callable[[torch.Tensor, Rows, MicroBatch, LossConfig], torch.Tensor]


def over_sequences(per_token: torch.Tensor, rows: Rows, batch: MicroBatch, config: LossConfig) -> torch.Tensor:
    """Compute 1/S sum_s 1/|s| sum_t x_t: every completion has equal weight. GRPO, https://arxiv.org/abs/2402.03300.

    |s| are the tokens of a completion in all its sequences.
    """
    of_sequences = rows.lay(per_token).sum(1) / batch.completion_lengths.clamp(min=1)
    return of_sequences.sum() / max(batch.step.loss_completions, 1)


def over_tokens(per_token: torch.Tensor, rows: Rows, batch: MicroBatch, config: LossConfig) -> torch.Tensor:
    """Compute 1/N sum_s sum_t x_t: every token has equal weight. DAPO, https://arxiv.org/abs/2503.14476."""
    return per_token.sum() / max(batch.step.loss_tokens, 1)


def over_sequence_sums(per_token: torch.Tensor, rows: Rows, batch: MicroBatch, config: LossConfig) -> torch.Tensor:
    """Compute 1/S sum_s sum_t x_t: a completion's weight is its length. LUSPO, https://arxiv.org/abs/2602.05261."""
    return per_token.sum() / max(batch.step.loss_completions, 1)


def over_budget(per_token: torch.Tensor, rows: Rows, batch: MicroBatch, config: LossConfig) -> torch.Tensor:
    """Compute 1/(S L) sum_s sum_t x_t with L = --max_completion_length. Dr. GRPO, https://arxiv.org/abs/2503.20783."""
    return per_token.sum() / (max(batch.step.loss_completions, 1) * config.max_completion_length)


# ---- for metrics: over trained tokens only, with or without --overlong_filter


def token_mean(per_token: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Compute the share of the mean over the step's trained tokens: [m] -> []."""
    return per_token.detach().sum(dtype=torch.float32) / max(batch.step.tokens, 1)


def sequence_mean(per_sequence: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Compute the share of the mean over the step's sequences that have trained tokens: [s] -> []."""
    return (per_sequence.detach() * (batch.lengths > 0)).sum() / max(batch.step.sequences, 1)


def sequence_max(per_sequence: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return the largest of [s], -inf if no sequence is trained; not a share: MegatronEngine reduces by max."""
    return per_sequence.detach().masked_fill(batch.lengths == 0, -torch.inf).max()


def sequence_min(per_sequence: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return the smallest of [s], inf if no sequence is trained; not a share: MegatronEngine reduces by min."""
    return per_sequence.detach().masked_fill(batch.lengths == 0, torch.inf).min()
