"""The policy losses. All but `real` have a value per token, [m], which they return with its metrics.

r: importance ratio at --importance_sampling_level, A: advantage, both per token.
"""

import math

import torch

from swift_megatron_grpo.settings.losses import LossConfig
from swift_megatron_grpo.training.loss.averages import sequence_max, sequence_mean, sequence_min, token_mean
from swift_megatron_grpo.training.loss.terms import SAFE, Metrics, Terms

_DPPO_TRUNCATION = 20.0  # of the ratio, and below: the authors' values
_DPPO_LEAST = 1e-8
_VESPO_LEAST = math.log(1e-8)  # the authors'


def clipped(terms: Terms, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """Compute PPO's clipped surrogate, https://arxiv.org/abs/1707.06347, with DAPO's two bounds (2503.14476):

        - min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)

    For A < 0 and large r, r A is not bounded. Two flags bound it, in the same way where both apply:
    --delta: min(r, delta) in the first term (INTELLECT-2, https://arxiv.org/abs/2505.07291)
    --dual_clip: max(the above, dual_clip A) where A < 0 (https://arxiv.org/abs/1912.09729)
    """
    ratio = terms.ratio
    advantages = terms.advantages
    first = ratio if config.delta is None else ratio.clamp(max=config.delta)
    bounded = ratio.clamp(1 - config.epsilon, 1 + config.high)
    gain = torch.min(first * advantages, bounded * advantages)
    if config.dual_clip is not None:
        gain = torch.where(advantages < 0, torch.max(gain, config.dual_clip * advantages), gain)
    return -gain, clip_metrics(terms, config)


def clip_metrics(terms: Terms, config: LossConfig) -> Metrics:
    """Compute the fraction of tokens whose gradient clipping removes. The extremes are over completions."""
    ratio = terms.ratio.detach()
    advantages = terms.advantages
    batch = terms.batch
    low = ((ratio < 1 - config.epsilon) & (advantages < 0)).float()
    high = ((ratio > 1 + config.high) & (advantages > 0)).float()
    either = token_mean(low + high, batch)
    return {
        "actor/clipfrac": either,
        "clip_ratio/region_mean": either,
        "clip_ratio/low_mean": token_mean(low, batch),
        "clip_ratio/high_mean": token_mean(high, batch),
        "clip_ratio/low_min": sequence_min(terms.rows.mean(low), batch),
        "clip_ratio/high_max": sequence_max(terms.rows.mean(high), batch),
    }


def cispo(terms: Terms, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """Compute CISPO, https://arxiv.org/abs/2506.13585: every token keeps its gradient, only its weight is bounded.

        - sg[min(r, epsilon_high)] A log pi

    Like in ms-swift, epsilon_high is the bound itself here, not its distance from 1.
    """
    ratio = terms.ratio.detach()
    over = ((ratio > config.high) & (terms.advantages > 0)).float()
    loss = -ratio.clamp(max=config.high) * terms.advantages * terms.logprobs
    clipped_share = token_mean(over, terms.batch)
    return loss, {"cispo_clip_ratio": clipped_share, "actor/clipfrac": clipped_share}


def sapo(terms: Terms, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """Compute SAPO, https://arxiv.org/abs/2511.20347: a soft gate instead of a hard clip.

    - 4/tau sigmoid(tau (r - 1)) A    with tau_pos if A > 0, else tau_neg
    """
    tau_pos = config.sapo.tau_pos
    tau_neg = config.sapo.tau_neg
    positive = 4 / tau_pos * torch.sigmoid(tau_pos * (terms.ratio - 1))
    negative = 4 / tau_neg * torch.sigmoid(tau_neg * (terms.ratio - 1))
    return -torch.where(terms.advantages > 0, positive, negative) * terms.advantages, {}


def vespo(terms: Terms, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """Compute VESPO, https://arxiv.org/abs/2602.10693: a soft weight by the ratio of the whole completion.

    - sg[phi(W)] A log pi    with W = prod_t r_t, phi(W) = W^k exp(lambda (1 - W)), and k_pos, lambda_pos if A >= 0
    """
    rows, settings = terms.rows, config.vespo
    log_weight = rows.lay(terms.log_ratio.detach().clamp(-SAFE, SAFE)).sum(1).clamp(_VESPO_LEAST, SAFE)
    log_weight = rows.spread(log_weight)
    good = terms.advantages >= 0
    power = torch.where(good, settings.vespo_k_pos, settings.vespo_k_neg)
    decay = torch.where(good, settings.vespo_lambda_pos, settings.vespo_lambda_neg)
    phi = (power * log_weight + decay * (1 - log_weight.exp())).exp()
    of_sequences = sequence_mean(rows.mean(phi), terms.batch)
    return -phi * terms.advantages * terms.logprobs, {"vespo/phi_seq_mean": of_sequences}


def dppo_tv(terms: Terms, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """Compute DPPO, https://arxiv.org/abs/2602.04879: a token is masked by how much probability its policy has moved.

    - sg[min(r, 20)] A log pi, or 0 where pi - pi_old > epsilon_high and A > 0, or pi_old - pi > epsilon and A <= 0

    The difference of two probabilities is the total variation of the policies if all other tokens are taken as one.
    """
    moved = terms.logprobs.detach().exp() - terms.old.exp()
    return _masked(terms, torch.where(terms.advantages > 0, moved <= config.high, moved >= -config.epsilon))


def dppo_kl(terms: Terms, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """Compute DPPO, in the same paper, with KL(pi_old | pi) of that one token and all others as the distance."""
    now, old = terms.logprobs.detach(), terms.old
    others_now, others_old = (-torch.expm1(logprobs).clamp(max=0) + _DPPO_LEAST for logprobs in (now, old))
    distance = old.exp() * (old - now) + (1 - old.exp()) * (others_old / others_now).log()
    near = torch.where(terms.advantages > 0, distance <= config.high, distance <= config.epsilon)
    return _masked(terms, near | torch.where(terms.advantages > 0, now <= old, now >= old))


def _masked(terms: Terms, kept: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
    weight = terms.ratio.detach().clamp(max=_DPPO_TRUNCATION) * kept
    loss = -weight * terms.advantages * terms.logprobs
    return loss, {"actor/clipfrac": token_mean((~kept).float(), terms.batch)}


def fipo(terms: Terms, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """Compute FIPO, https://arxiv.org/abs/2603.19835: the clipped surrogate with a weight per token.

    The weight measures how much the policy has changed on the tokens after it:

        F_t = sum_{k >= t} gamma^(k - t) (log pi(k) - log pi_old(k)),    gamma = 2^(-1 / decay_rate)
        weight = sg[clip(exp F_t)],  clamped to [0.8, 1] if A < 0 and r > safety_threshold

    Like in ms-swift, tokens with r > --delta add nothing to F, and clip is to [1, 1 + clip_range] or, without
    clip_high_only, [1 - clip_range, 1 + clip_range].
    """
    loss, metrics = clipped(terms, config)
    weight, future, capped = influence(terms, config)
    batch = terms.batch
    return loss * weight, metrics | {
        "fipo/future_kl_mean": token_mean(future, batch),
        "fipo/influence_weight_mean": token_mean(weight, batch),
        "fipo/safety_keep_ratio": token_mean(1 - capped, batch),
    }


@torch.no_grad()
def influence(terms: Terms, config: LossConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return FIPO's weight, F, and 1.0 for tokens that the safety threshold caps: [m] each."""
    settings = config.fipo
    rows = terms.rows
    log_ratio = terms.log_ratio
    if config.delta is not None:
        log_ratio = log_ratio.masked_fill(terms.ratio > config.delta, 0.0)
    future = rows.pick(discounted_future_sum(rows.lay(log_ratio), 2 ** (-1 / settings.fipo_decay_rate)))
    weight = future.clamp(-SAFE, SAFE).exp()
    if settings.fipo_clip_range:
        low = 1.0 if settings.fipo_clip_high_only else 1 - settings.fipo_clip_range
        weight = weight.clamp(low, 1 + settings.fipo_clip_range)
    capped = torch.zeros_like(weight)
    if settings.fipo_safety_threshold is not None:
        risky = (terms.advantages < 0) & (terms.ratio > settings.fipo_safety_threshold)
        weight = torch.where(risky, weight.clamp(0.8, 1.0), weight)
        capped = risky.float()
    return weight, future, capped


def discounted_future_sum(grid: torch.Tensor, gamma: float) -> torch.Tensor:
    """Compute y_t = sum_{k >= t} gamma^(k - t) x_k along the rows of [s, w], in log2(w) steps that double its reach."""
    reach = 1
    width = grid.shape[1]
    while reach < width:
        later = torch.nn.functional.pad(grid[:, reach:], (0, reach))
        grid = grid + gamma**reach * later
        reach *= 2
    return grid


def real(terms: Terms, kept: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Compute REAL, https://arxiv.org/abs/2602.05630: a classification loss over a prompt's completions.

    Rewards are its labels. Returns the micro batch's share of the mean over the step's groups. The value of a group is

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
