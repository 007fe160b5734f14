"""What every loss starts from: log-probs, now and when the completions were generated, and their ratio.

m: trained tokens of the micro batch, s: its sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swift_megatron_grpo.config import RatioLevel
from swift_megatron_grpo.packing.collate import MicroBatch
from swift_megatron_grpo.training.loss.rows import Rows

# exp(20) is 5e8. Beyond it a ratio says only "far away"; exp would overflow, and its gradient be 0 * inf.
SAFE = 20.0

Metrics = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What the model says of the trained tokens."""

    logprobs: torch.Tensor  # [m] fp32, with gradient
    entropy: torch.Tensor | None  # [m] fp32, with gradient; None: not asked for


@dataclass(frozen=True, slots=True)
class Terms:
    batch: MicroBatch
    rows: Rows
    logprobs: torch.Tensor  # [m] with gradient
    entropy: torch.Tensor | None  # [m] with gradient
    old: torch.Tensor  # [m] of the old policy, as the trainer computes them; or of an older one, as the engine told
    log_ratio: torch.Tensor  # [m] logprobs - old
    ratio: torch.Tensor  # [m] importance of a token at --importance_sampling_level
    advantages: torch.Tensor  # [m]

    @classmethod
    def of(cls, batch: MicroBatch, output: TokenOutput, level: RatioLevel) -> Terms:
        rows = Rows.of(batch)
        # On the first step after a rollout the policy is the old one itself: the ratio is exactly 1.
        old = output.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        log_ratio = output.logprobs - old
        ratio = at_level(log_ratio, rows, level).clamp(-SAFE, SAFE).exp()
        return cls(batch, rows, output.logprobs, output.entropy, old, log_ratio, ratio, batch.advantages)


def at_level(log_ratio: torch.Tensor, rows: Rows, level: RatioLevel) -> torch.Tensor:
    """[m] -> [m], the log of

    token           r_t = pi(t) / pi_old(t)
    sequence        s = (prod_t r_t) ^ (1 / |s|), the same for all tokens: GSPO, https://arxiv.org/abs/2507.18071
    sequence_token  sg[s] * pi(t) / sg[pi(t)]: that value, each token with the gradient of its own: GSPO-token, there
    """
    if level == "token":
        return log_ratio
    sequence = rows.spread(rows.mean(log_ratio))
    if level == "sequence":
        return sequence
    return log_ratio - log_ratio.detach() + sequence.detach()
