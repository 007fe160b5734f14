"""The inputs of every loss: log-probs now, log-probs when the completions were generated, and their ratio.

m: trained tokens of the micro batch, s: its sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swift_megatron_grpo.packing.collate import MicroBatch
from swift_megatron_grpo.settings.config import RatioLevel
from swift_megatron_grpo.training.loss.rows import Rows

# exp(20) is 5e8. A larger ratio has no more meaning than "far off", but exp would overflow and its gradient be 0 * inf.
SAFE = 20.0

Metrics = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """Model outputs for the trained tokens."""

    logprobs: torch.Tensor  # [m] fp32, with gradient
    entropy: torch.Tensor | None  # [m] fp32, with gradient; None: not requested


@dataclass(frozen=True, slots=True)
class Terms:
    """Inputs of a loss for one micro batch."""

    batch: MicroBatch
    rows: Rows
    logprobs: torch.Tensor  # [m] with gradient
    entropy: torch.Tensor | None  # [m] with gradient
    old: torch.Tensor  # [m] log-probs of the old policy by the trainer, or of an older policy by the inference engine
    log_ratio: torch.Tensor  # [m] logprobs - old
    ratio: torch.Tensor  # [m] importance of a token at --importance_sampling_level
    advantages: torch.Tensor  # [m]

    @classmethod
    def of(cls, batch: MicroBatch, output: TokenOutput, level: RatioLevel) -> Terms:
        """Compute the terms of a micro batch."""
        rows = Rows.of(batch)
        # On the first step after a rollout the policy is the old one itself: the ratio is exactly 1.
        old = output.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        log_ratio = output.logprobs - old
        ratio = at_level(log_ratio, rows, level).clamp(-SAFE, SAFE).exp()
        return cls(
            batch=batch,
            rows=rows,
            logprobs=output.logprobs,
            entropy=output.entropy,
            old=old,
            log_ratio=log_ratio,
            ratio=ratio,
            advantages=batch.advantages,
        )


def at_level(log_ratio: torch.Tensor, rows: Rows, level: RatioLevel) -> torch.Tensor:
    """Return the log of the importance ratio, [m] -> [m], at one of these levels:

    token           r_t = pi(t) / pi_old(t)
    sequence        s = (prod_t r_t) ^ (1 / |s|), the same for all tokens: GSPO, https://arxiv.org/abs/2507.18071
    sequence_token  sg[s] * pi(t) / sg[pi(t)]: that value with each token's own gradient: GSPO-token, in the same paper
    """
    if level == "token":
        return log_ratio
    sequence = rows.spread(rows.mean(log_ratio))
    if level == "sequence":
        return sequence
    return log_ratio - log_ratio.detach() + sequence.detach()
