"""The papers' formulas, token by token in fp64: the reference for the losses.

Written for readability, not for speed, and independently of the losses' code. Choices of ms-swift 4.6.0 that differ
from the paper are marked (ms-swift).
"""

from __future__ import annotations

import math

import torch

from swift_megatron_grpo.settings.losses import LossConfig
from tests.unit.training.loss.losses import Step

Value = torch.Tensor  # a number, fp64, with gradient


def number(value: float) -> Value:
    return torch.tensor(value, dtype=torch.float64)


def reference(step: Step, config: LossConfig) -> tuple[float, list[list[float]]]:
    """Return the loss of a whole step, and its gradient with respect to every log-prob."""
    now = [torch.tensor(v, dtype=torch.float32).double().requires_grad_() for v in step.logprobs]
    loss = total(step, now, config)
    used = [values for values in now if len(values)]
    computed = iter(torch.autograd.grad(loss, used, allow_unused=True))
    gradients = [next(computed) if len(values) else None for values in now]
    return loss.item(), [[0.0] * len(v) if g is None else g.tolist() for v, g in zip(now, gradients, strict=True)]


def total(step: Step, now: list[Value], config: LossConfig) -> Value:
    """Compute (policy loss + beta KL - entropy_coef H) * correction per token, averaged as the loss defines."""
    sequences = [i for i, values in enumerate(now) if len(values)]
    of_tokens: dict[int, list[Value]] = {}
    for i in sequences:
        sample, kept = step.samples[i], is_kept(step, i, now[i], config)
        ratios = importance(log_ratios(step, i, now[i]), config)
        weights = correction(step, i, now[i], config)
        rows = []
        for t in range(len(now[i])):
            policy = number(0.0)
            if config.name != "real" and (sample.selected is None or sample.selected[t]):
                policy = policy_loss(step, i, t, now[i], ratios, config)
            kl = number(0.0)
            if sample.ref_logprobs is not None:
                kl = config.kl_weight * divergence(now[i][t], number(sample.ref_logprobs[t]), config.estimator)
                kl = kl * ratios[t] if config.use_bias_correction_kl else kl
            bonus = config.entropy_coef * step.entropies[i][t]
            rows.append((policy + kl - bonus) * weights[t] * kept)
        of_tokens[i] = rows
    loss = average(step, of_tokens, config)
    return loss + classification(step, now, config) if config.name == "real" else loss


def average(step: Step, of_tokens: dict[int, list[Value]], config: LossConfig) -> Value:
    in_loss = [sum(s.completion_mask) + s.left_out for s in step.samples]
    completions, tokens = len({owner(step, i) for i, n in enumerate(in_loss) if n > 0}), sum(in_loss)
    total = number(0.0)
    for i, rows in of_tokens.items():
        in_all_sequences = sum(len(others) for j, others in of_tokens.items() if owner(step, j) == owner(step, i))
        for value in rows:
            if config.name in ("grpo", "sapo"):
                total = total + value / in_all_sequences / completions
            elif config.name == "dr_grpo":
                total = total + value / (completions * (config.max_completion_length or 0))
            elif config.name == "luspo":
                total = total + value / completions
            else:
                total = total + value / tokens
    return total


def owner(step: Step, i: int) -> tuple[str, int]:
    """Return the completion of a sequence."""
    number = step.samples[i].completion
    return ("alone", i) if number < 0 else ("completion", number)


def log_ratios(step: Step, i: int, now: Value) -> list[Value]:
    old = step.samples[i].old_logprobs
    return [now[t] - (now[t].detach() if old is None else old[t]) for t in range(len(now))]


def importance(log_ratio: list[Value], config: LossConfig) -> list[Value]:
    mean = sum(log_ratio, number(0.0)) / len(log_ratio)
    if config.importance_sampling_level == "token":
        return [x.exp() for x in log_ratio]
    if config.importance_sampling_level == "sequence":
        return [mean.exp() for _ in log_ratio]
    return [mean.detach().exp() * (x - x.detach()).exp() for x in log_ratio]


def policy_loss(step: Step, i: int, t: int, now: Value, ratios: list[Value], config: LossConfig) -> Value:
    advantage, r = step.samples[i].advantage, ratios[t]
    if config.name == "cispo":
        return -min(r.item(), config.high) * advantage * now[t]  # (ms-swift): epsilon_high is the bound
    if config.name == "sapo":
        tau = config.sapo.tau_pos if advantage > 0 else config.sapo.tau_neg
        return -(4 / tau) / (1 + (-tau * (r - 1)).exp()) * advantage
    if config.name == "vespo":
        return -vespo_weight(log_ratios(step, i, now), advantage, config) * advantage * now[t]
    if config.name in ("dppo_tv", "dppo_kl"):
        old = step.samples[i].old_logprobs
        kept = is_near(now[t].item(), now[t].item() if old is None else old[t], advantage, config)
        return -min(r.item(), 20.0) * advantage * now[t] * kept
    loss = -surrogate(r, advantage, config)
    if config.name == "fipo":
        loss = loss * fipo_weight(log_ratios(step, i, now), ratios, t, advantage, config)
    return loss


def surrogate(r: Value, advantage: float, config: LossConfig) -> Value:
    clipped = r
    if r < 1 - config.epsilon:
        clipped = number(1 - config.epsilon)
    if r > 1 + config.high:
        clipped = number(1 + config.high)
    first = number(config.delta) if config.delta is not None and r > config.delta else r
    gain = first * advantage if first * advantage < clipped * advantage else clipped * advantage
    if config.dual_clip is not None and advantage < 0 and gain < config.dual_clip * advantage:
        gain = number(config.dual_clip * advantage)
    return gain


def is_near(now: float, old: float, advantage: float, config: LossConfig) -> bool:
    """Return False if DPPO masks the token: both policies are taken as coins that show this token or another."""
    p, q = math.exp(now), math.exp(old)
    limit = config.high if advantage > 0 else config.epsilon
    if (p <= q) if advantage > 0 else (p >= q):
        return True
    if config.name == "dppo_tv":
        return abs(p - q) <= limit
    others = [max(1 - x, 0) + 1e-8 for x in (q, p)]
    return q * math.log(q / p) + (1 - q) * math.log(others[0] / others[1]) <= limit


def vespo_weight(log_ratio: list[Value], advantage: float, config: LossConfig) -> float:
    """Compute phi(W) with W, the ratio of the whole completion, in [1e-8, e^20]."""
    settings = config.vespo
    k, decay = settings.vespo_k_pos, settings.vespo_lambda_pos
    if advantage < 0:
        k, decay = settings.vespo_k_neg, settings.vespo_lambda_neg
    weight = min(max(math.exp(sum(x.item() for x in log_ratio)), 1e-8), math.exp(20))
    return weight**k * math.exp(decay * (1 - weight))


def fipo_weight(log_ratio: list[Value], ratios: list[Value], t: int, advantage: float, config: LossConfig) -> float:
    settings, gamma = config.fipo, 0.5 ** (1 / config.fipo.fipo_decay_rate)
    future = 0.0
    for k in range(t, len(log_ratio)):
        if config.delta is None or ratios[k] <= config.delta:
            future += gamma ** (k - t) * log_ratio[k].item()
    weight = number(future).exp().item()
    if settings.fipo_clip_range:
        low = 1.0 if settings.fipo_clip_high_only else 1 - settings.fipo_clip_range
        weight = min(max(weight, low), 1 + settings.fipo_clip_range)
    if settings.fipo_safety_threshold is not None and advantage < 0 and ratios[t] > settings.fipo_safety_threshold:
        weight = min(max(weight, 0.8), 1.0)
    return weight


def divergence(now: Value, base: Value, estimator: str) -> Value:
    gap = base - now
    return {"k1": -gap, "abs": gap.abs(), "k2": gap * gap / 2, "k3": gap.exp() - 1 - gap}[estimator]


def correction(step: Step, i: int, now: Value, config: LossConfig) -> list[float]:
    sample, settings = step.samples[i], config.correction
    if settings.rollout_importance_sampling_mode is None:
        return [1.0] * len(now)
    old = [v.item() for v in now] if sample.old_logprobs is None else sample.old_logprobs
    log_rho = [o - r for o, r in zip(old, sample.rollout_logprobs or [], strict=True)]
    rho = [number(x).exp().item() for x in log_rho]
    of_sequence = number(sum(log_rho) / len(log_rho)).exp().item()
    limit = settings.rollout_importance_sampling_threshold
    return {
        "token_truncate": [min(x, limit) for x in rho],
        "token_mask": [x if x <= limit else 0.0 for x in rho],
        "sequence_truncate": [min(of_sequence, limit)] * len(rho),
        "sequence_mask": rho if of_sequence <= limit else [0.0] * len(rho),
    }[settings.rollout_importance_sampling_mode]


def is_kept(step: Step, i: int, now: Value, config: LossConfig) -> bool:
    """Return False if off-policy sequence masking removes the sequence."""
    sample = step.samples[i]
    if config.correction.off_policy_sequence_mask_delta is None or sample.advantage >= 0:
        return True
    generated = sample.rollout_logprobs or sample.old_logprobs
    if generated is None:
        return True
    drift = sum(g - n.item() for g, n in zip(generated, now, strict=True)) / len(generated)
    return drift <= config.correction.off_policy_sequence_mask_delta


def classification(step: Step, now: list[Value], config: LossConfig) -> Value:
    """Compute REAL: the mean over groups of log(1 + sum_neg e^s) + log(1 + sum_pos e^-s)."""
    groups: dict[int, list[int]] = {}
    for i, sample in enumerate(step.samples):
        if len(now[i]) or sample.left_out:
            groups.setdefault(sample.group, []).append(i)
    total = number(0.0)
    for members in groups.values():
        scores = {}
        for i in members:
            if len(now[i]) and is_kept(step, i, now[i], config):
                scores[i] = sum(log_ratios(step, i, now[i]), number(0.0)) / len(now[i]) / config.real_tau
        positive = [s for i, s in scores.items() if step.samples[i].advantage > 0]
        negative = [s for i, s in scores.items() if step.samples[i].advantage <= 0]
        if positive and negative:
            total = total + (1 + sum(s.exp() for s in negative)).log() + (1 + sum((-s).exp() for s in positive)).log()
    return total / len(groups)
