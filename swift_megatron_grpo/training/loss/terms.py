"""The inputs of every loss: log-probs now, log-probs when the completions were generated, and their ratio.

m: trained tokens of the micro batch, s: its sequences, w: tokens of the longest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swift_megatron_grpo.packing.collate import MicroBatch
from swift_megatron_grpo.settings.losses import LossConfig, RatioLevel
from swift_megatron_grpo.training.loss.teaching import guided

# exp(20) is 5e8. A larger ratio has no more meaning than "far off", but exp would overflow and its gradient be 0 * inf.
SAFE = 20.0

Metrics = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """Model outputs for the trained tokens."""

    logprobs: torch.Tensor  # [m] fp32, with gradient
    entropy: torch.Tensor | None  # [m] fp32, with gradient; None: not requested


@dataclass(frozen=True, slots=True)
class Rows:
    """Index of packed tokens in a grid of sequences, for losses that read whole sequences.

    Every index is used once, so gradients are summed in a fixed order: no atomics, and runs are reproducible.
    """

    lengths: torch.Tensor  # [s]
    width: int
    places: torch.Tensor  # [m] cell of token i among the s * w cells

    @classmethod
    def of(cls, batch: MicroBatch) -> Rows:
        lengths = batch.lengths
        tokens = sum(batch.counts)
        width = max(batch.counts)
        sequence = torch.arange(len(batch.counts), device=lengths.device).repeat_interleave(lengths, output_size=tokens)
        starts = lengths.cumsum(0) - lengths
        places = torch.arange(tokens, device=lengths.device) - starts[sequence] + sequence * width
        return cls(lengths, width, places)

    def lay(self, values: torch.Tensor) -> torch.Tensor:
        """Lay tokens out as a grid: [m] -> [s, w], zeros after the end of a sequence."""
        cells = values.new_zeros(len(self.lengths) * self.width)
        return cells.index_copy(0, self.places, values).view(len(self.lengths), self.width)

    def pick(self, grid: torch.Tensor) -> torch.Tensor:
        """Return the tokens of a grid: [s, w] -> [m]."""
        return grid.reshape(-1).index_select(0, self.places)

    def spread(self, per_sequence: torch.Tensor) -> torch.Tensor:
        """Give each token the value of its sequence: [s] -> [m]."""
        return self.pick(per_sequence[:, None].expand(-1, self.width))

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Average over the tokens of each sequence: [m] -> [s]; 0 for a sequence without trained tokens."""
        return self.lay(values).sum(1) / self.lengths.clamp(min=1)


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
    advantages: torch.Tensor  # [m] with the teacher's

    @classmethod
    def of(cls, batch: MicroBatch, output: TokenOutput, config: LossConfig) -> Terms:
        """Return the inputs of the losses that `config` describes."""
        rows = Rows.of(batch)
        # On the first step after a rollout the policy is the old one itself: the ratio is exactly 1.
        old = output.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        log_ratio = output.logprobs - old
        ratio = at_level(log_ratio, rows, config.importance_sampling_level).clamp(-SAFE, SAFE).exp()
        ratios = batch.teacher_ratios
        return cls(
            batch=batch, rows=rows, logprobs=output.logprobs, entropy=output.entropy, old=old, log_ratio=log_ratio,
            ratio=ratio,
            advantages=batch.advantages if ratios is None else guided(batch.advantages, ratios, config),
        )  # fmt: skip


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
