"""Rollout correction: the inference engine and the trainer compute different probabilities of the same tokens.

rho = pi_old / pi_rollout: the trainer's probability of a token when it was generated, over the inference engine's.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from swift_megatron_grpo.settings.losses import Correction
from swift_megatron_grpo.training.loss.averages import sequence_max, sequence_mean, sequence_min, token_mean
from swift_megatron_grpo.training.loss.kl import k3
from swift_megatron_grpo.training.loss.terms import SAFE, Metrics, Rows, Terms


def importance_weights(log_rho: torch.Tensor, rows: Rows, config: Correction) -> torch.Tensor:
    """Compute importance weights, [m] -> [m].

    Truncated importance sampling, https://fengyao.notion.site/off-policy-rl, and IcePop, its masked variant:

    token_truncate     min(rho_t, C)
    token_mask         rho_t where rho_t <= C, else 0
    sequence_truncate  min(rho_s, C) with rho_s = exp(mean_t log rho_t)
    sequence_mask      rho_t where rho_s <= C, else 0
    """
    rho, mode = log_rho.clamp(-SAFE, SAFE).exp(), config.rollout_importance_sampling_mode
    limit = config.rollout_importance_sampling_threshold
    if mode == "token_truncate":
        return rho.clamp(max=limit)
    if mode == "token_mask":
        return rho.masked_fill(rho > limit, 0.0)
    rho_of_sequence = sequence_rho(log_rho, rows)
    if mode == "sequence_truncate":
        return rows.spread(rho_of_sequence.clamp(max=limit))
    return rho * rows.spread((rho_of_sequence <= limit).to(rho.dtype))


def weights_of_completion(policy: Sequence[float], engine: Sequence[float], config: Correction) -> np.ndarray:
    """Compute the importance weights of one completion from its log-probs by the trainer and the engine, [c]."""
    log_rho = torch.tensor(policy, dtype=torch.float64) - torch.tensor(engine, dtype=torch.float64)
    rows = Rows(torch.tensor([len(policy)]), len(policy), torch.arange(len(policy)))
    weights: np.ndarray = importance_weights(log_rho, rows, config).numpy()
    return weights


def sequence_rho(log_rho: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Compute exp(mean_t log rho_t) of every sequence: [m] -> [s]."""
    return rows.mean(log_rho.clamp(-SAFE, SAFE)).exp()


@torch.no_grad()
def near_policy(terms: Terms, delta: float) -> torch.Tensor:
    """Return [s], False for sequences to mask: A < 0 and mean_t (log pi_generated - log pi) > delta.

    Off-policy sequence masking, DeepSeek-V3.2, https://arxiv.org/abs/2512.02556. log pi_generated: the log-probs of the
    inference engine if there are any, else the trainer's.
    """
    rows = terms.rows
    batch = terms.batch
    generated = terms.old if batch.rollout_logprobs is None else batch.rollout_logprobs
    drift = rows.mean(generated - terms.logprobs)
    return ~((drift > delta) & (rows.mean(terms.advantages) < 0))


def second_moment_limit(squares: Iterable[np.ndarray], threshold: float) -> float:
    """Return the least square to mask, so that the mean of the smaller ones is below `threshold`; inf: mask none.

    M2PO, https://arxiv.org/abs/2510.01161: `squares` are (log pi - log pi_generated)^2 of all tokens of a step, [c] of
    each sample. The largest ones are masked, and equal ones together, so that neither packing nor ranks decide which.
    """
    ascending = np.sort(np.concatenate([np.zeros(0), *squares]))
    means = ascending.cumsum() / np.arange(1, len(ascending) + 1)  # of each beginning; they ascend as well
    kept = int(np.searchsorted(means, threshold))
    return float(ascending[kept]) if kept < len(ascending) else math.inf


@torch.no_grad()
def mismatch_metrics(terms: Terms) -> Metrics:
    """Compute the distance of the trainer's policy at generation to the inference engine's, under ms-swift's names."""
    batch = terms.batch
    rows = terms.rows
    rollout = batch.rollout_logprobs
    assert rollout is not None
    log_rho = terms.old - rollout
    trained = rows.mean(terms.old)  # [s]
    generated = rows.mean(rollout)  # [s]
    rho = log_rho.clamp(-SAFE, SAFE).exp()
    geometric = rows.mean(log_rho).clamp(-SAFE, SAFE).exp()
    gap = generated - trained
    metrics = {
        "training_ppl": sequence_mean((-trained).clamp(max=SAFE).exp(), batch),
        "training_log_ppl": sequence_mean(-trained, batch),
        "rollout_ppl": sequence_mean((-generated).clamp(max=SAFE).exp(), batch),
        "rollout_log_ppl": sequence_mean(-generated, batch),
        "kl": token_mean(-log_rho, batch),
        "k3_kl": token_mean(k3(rollout, terms.old), batch),
        "log_ppl_diff": sequence_mean(gap, batch),
        "log_ppl_abs_diff": sequence_mean(gap.abs(), batch),
        "log_ppl_diff_max": sequence_max(gap, batch),
        "log_ppl_diff_min": sequence_min(gap, batch),
        "ppl_ratio": sequence_mean(gap.clamp(-SAFE, SAFE).exp(), batch),
        "chi2_token": token_mean(rho.square() - 1, batch),
        "chi2_seq": sequence_mean(geometric.square() - 1, batch),
    }
    return {f"rollout_correction/{name}": value for name, value in metrics.items()}


# The effective sample size is a quotient of sums: `effective_sample_size` divides once the whole step is summed.
_MEAN = "rollout_correction/ess_mean"
_SQUARE = "rollout_correction/ess_square"


@torch.no_grad()
def weight_metrics(log_rho: torch.Tensor, weights: torch.Tensor, terms: Terms, config: Correction) -> Metrics:
    batch = terms.batch
    limit = config.rollout_importance_sampling_threshold
    bounded = weights.clamp(1 / limit, limit)
    if config.rollout_importance_sampling_mode in ("token_truncate", "token_mask"):
        outside = token_mean((log_rho.clamp(-SAFE, SAFE).exp() > limit).float(), batch)
    else:
        outside = sequence_mean((sequence_rho(log_rho, terms.rows) > limit).float(), batch)
    return {
        "rollout_correction/is_weight_mean": token_mean(weights, batch),
        "rollout_correction/clipped_frac": outside,
        _MEAN: token_mean(bounded, batch),
        _SQUARE: token_mean(bounded.square(), batch),
    }


def effective_sample_size(metrics: dict[str, float]) -> dict[str, float]:
    """Replace the two sums by (mean w)^2 / mean w^2, a fraction of the tokens: 1 if all bounded weights are equal."""
    if _MEAN not in metrics:
        return metrics
    rest = {name: value for name, value in metrics.items() if name not in (_MEAN, _SQUARE)}
    if metrics[_SQUARE] == 0:  # no token was trained
        return rest
    return {**rest, "rollout_correction/ess": metrics[_MEAN] ** 2 / metrics[_SQUARE]}
