"""The total loss: policy loss + beta * KL - entropy_coef * entropy, and that of SDAR."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from swift_megatron_grpo.packing.collate import MicroBatch
from swift_megatron_grpo.settings.distillation import Sdar
from swift_megatron_grpo.settings.losses import LossConfig
from swift_megatron_grpo.training.loss import averages, correction, policies
from swift_megatron_grpo.training.loss.kl import ESTIMATORS, k3
from swift_megatron_grpo.training.loss.terms import Metrics, Terms, TokenOutput

LossFunction = Callable[[MicroBatch, TokenOutput], tuple[torch.Tensor, Metrics]]
PolicyLoss = Callable[[Terms, LossConfig], tuple[torch.Tensor, Metrics]]
MetricFunction = Callable[[Terms, LossConfig], Metrics]


@dataclass(frozen=True, slots=True)
class Loss:
    """A policy loss and how its tokens are averaged."""

    policy: PolicyLoss | None  # per token; None: REAL, the loss of whole groups
    average: averages.Average
    reads_entropy: bool = False


LOSSES: dict[str, Loss] = {
    "grpo": Loss(policies.clipped, averages.over_sequences),
    "bnpo": Loss(policies.clipped, averages.over_tokens),  # as in ms-swift; over the whole step it equals dapo
    "dapo": Loss(policies.clipped, averages.over_tokens),
    "dr_grpo": Loss(policies.clipped, averages.over_budget),
    "luspo": Loss(policies.clipped, averages.over_sequence_sums),
    "cispo": Loss(policies.cispo, averages.over_tokens),
    "sapo": Loss(policies.sapo, averages.over_sequences),
    "vespo": Loss(policies.vespo, averages.over_tokens),
    "dppo_tv": Loss(policies.dppo_tv, averages.over_tokens),
    "dppo_kl": Loss(policies.dppo_kl, averages.over_tokens),
    "fipo": Loss(policies.fipo, averages.over_tokens),
    "real": Loss(None, averages.over_tokens),
}
MORE_METRICS: list[MetricFunction] = []  # of plugins, for every loss


def make_loss(config: LossConfig) -> LossFunction:
    """Return the loss function that `config` describes."""
    return partial(loss, config=config)


def reads_entropy(config: LossConfig) -> bool:
    """Return True if the model must compute entropies for this loss."""
    return config.log_entropy or config.entropy_coef != 0 or LOSSES[config.name].reads_entropy


def loss(batch: MicroBatch, output: TokenOutput, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """Compute this micro batch's share of the step's loss, and of its metrics."""
    terms = Terms.of(batch, output, config)
    recipe = LOSSES[config.name]
    weights, kept, metrics = _corrections(terms, config)

    def share(per_token: torch.Tensor) -> torch.Tensor:
        """Average the tokens of kept sequences, weighted by the rollout correction."""
        weighted = per_token if weights is None else per_token * weights
        kept_only = weighted if kept is None else weighted.masked_fill(~terms.rows.spread(kept), 0.0)
        return recipe.average(kept_only, terms.rows, batch, config)

    if recipe.policy is None:
        trained = batch.lengths > 0
        policy_loss = policies.real(terms, trained if kept is None else trained & kept, config)
    else:
        per_token, policy_metrics = recipe.policy(terms, config)
        metrics |= policy_metrics
        policy_loss = share(per_token if batch.selected is None else per_token * batch.selected)
    total = policy_loss
    metrics["actor/pg_loss"] = policy_loss.detach()
    metrics["actor/approxkl"] = averages.token_mean(0.5 * terms.log_ratio.square(), batch)

    if batch.ref_logprobs is not None:
        kl = ESTIMATORS[config.estimator](terms.logprobs, batch.ref_logprobs)
        if config.use_bias_correction_kl:
            kl = kl * terms.ratio  # with its gradient: https://arxiv.org/abs/2512.02556
        total = total + config.kl_weight * share(kl)
        metrics["kl"] = averages.token_mean(kl, batch)
    if batch.teacher_ratios is not None:
        zeros = torch.zeros_like(batch.teacher_ratios)
        metrics["teacher_kl"] = averages.token_mean(k3(zeros, batch.teacher_ratios), batch)
    if batch.teacher_logprobs is not None:
        sdar_loss, sdar_metrics = _sdar(terms, batch.teacher_logprobs, config.sdar)
        total = total + config.sdar.sdar_loss_coef * sdar_loss
        metrics |= sdar_metrics
    if terms.entropy is not None:
        if config.entropy_coef:
            total = total - config.entropy_coef * share(terms.entropy)
        of_sequences = terms.rows.mean(terms.entropy.detach())
        metrics["entropy/entropy_mean"] = averages.sequence_mean(of_sequences, batch)
        metrics["entropy/entropy_max"] = averages.sequence_max(of_sequences, batch)
        metrics["entropy/entropy_min"] = averages.sequence_min(of_sequences, batch)
    for more in MORE_METRICS:
        metrics |= more(terms, config)
    return total, metrics


def _sdar(terms: Terms, teacher: torch.Tensor, sdar: Sdar) -> tuple[torch.Tensor, Metrics]:
    """Return SDAR's loss, https://arxiv.org/abs/2605.15155, and its metrics.

    It is the mean over tokens, as in ms-swift, of sg[sigmoid(beta gap)] gap, with gap = log(teacher / policy).
    """
    batch = terms.batch
    gaps = teacher - terms.logprobs
    gates = (sdar.sdar_gate_beta * gaps.detach()).sigmoid()
    loss = (gates * gaps).sum() / max(batch.step.tokens, 1)
    return loss, {
        "sdar/loss": loss.detach(),
        "sdar/gate_mean": averages.token_mean(gates, batch),
        "sdar/gate_active_ratio": averages.token_mean((gates > 0.5).float(), batch),
        "sdar/teacher_gap_mean": averages.token_mean(gaps, batch),
        "teacher_kl": averages.token_mean(k3(terms.logprobs, teacher), batch),
    }


def _corrections(terms: Terms, config: LossConfig) -> tuple[torch.Tensor | None, torch.Tensor | None, Metrics]:
    """Return the weights of tokens [m] and the mask of trained sequences [s], None for no change, and metrics."""
    batch = terms.batch
    settings = config.correction
    mode = settings.rollout_importance_sampling_mode
    delta = settings.off_policy_sequence_mask_delta
    metrics: Metrics = {}
    weights = kept = None
    if batch.rollout_logprobs is not None:
        metrics["rollout/k3_kl"] = averages.token_mean(k3(batch.rollout_logprobs, terms.old), batch)
        if mode is not None or settings.log_rollout_offpolicy_metrics:
            metrics |= correction.mismatch_metrics(terms)
        if mode is not None:
            log_rho = terms.old - batch.rollout_logprobs
            weights = correction.importance_weights(log_rho, terms.rows, settings)
            metrics |= correction.weight_metrics(log_rho, weights, terms, settings)
    elif mode is not None:
        raise ValueError(f"rollout correction {mode} needs the engine's log-probs, but the samples have none")
    if delta is not None:
        kept = correction.near_policy(terms, delta)
        metrics["off_policy_sequence_mask/masked_frac"] = averages.sequence_mean((~kept).float(), batch)
    return weights, kept, metrics
