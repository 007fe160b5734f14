"""CHORD, https://arxiv.org/abs/2508.11408: one step of policy optimization and supervised fine-tuning."""

from functools import partial

import torch

from swift_megatron_grpo.packing.collate import MicroBatch
from swift_megatron_grpo.training.loss.terms import Metrics, TokenOutput
from swift_megatron_grpo.training.loss.total import LossFunction


def with_answers(policy: LossFunction, mu: float, phi: bool) -> LossFunction:
    """Return (1 - mu) times the policy's loss plus mu times that of the answers; the former alone where mu is 0."""
    return policy if mu == 0 else partial(_share, policy=policy, mu=mu, phi=phi)


def _share(
    batch: MicroBatch, output: TokenOutput, policy: LossFunction, mu: float, phi: bool
) -> tuple[torch.Tensor, Metrics]:
    """Compute the share of a micro batch, which has either answers or completions."""
    if batch.sft_weights is None:
        loss, metrics = policy(batch, output)
        return (1 - mu) * loss, metrics
    per_token = -output.logprobs * batch.sft_weights
    if phi:
        probability = output.logprobs.detach().exp()
        per_token = per_token * probability * (1 - probability)
    loss = per_token.sum() / max(batch.step.sft_tokens, 1)
    return mu * loss, {"chord/sft_loss": loss.detach()}
