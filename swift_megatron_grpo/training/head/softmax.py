"""Rows of logits -> log-probability of a target and entropy, and back to gradients: the arithmetic of the head.

For one row, l: the logits of the whole vocabulary, t: the target, T: the temperature, all in fp32:

    s[j] = (l[j] - peak) / T                 peak = max l, so that exp never overflows
    log p[j] = s[j] - log_total              log_total = log sum exp s
    H = log_total - sum(exp(s) * s) / sum(exp(s))
    d logp[t] / d l[j] = ((j == t) - p[j]) / T
    d H       / d l[j] = -p[j] * (log p[j] + H) / T

A tensor-parallel rank sums over its columns relative to its own peak (`sums_of_rows`), all ranks exchange these few
numbers per row (`over_ranks`), and each computes the same statistics from them (`combine`). Columns that only pad the
vocabulary have no say. On CUDA the two functions that touch logits are kernels (softmax_triton.py).

c: rows; v: vocabulary columns of this rank, padding included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from swift_megatron_grpo.training.head.row_statistics import LOWEST, RowStats, Vocabulary


def stats_of_rows(logits: torch.Tensor, targets: torch.Tensor, vocabulary: Vocabulary, entropy: bool) -> RowStats:
    """Of one piece of logits [c, v] and its targets [c]; the logits stay as they are."""
    sums = sums_of_rows(logits, targets, vocabulary, entropy)
    return combine(over_ranks(sums, vocabulary.group), vocabulary.temperature)


def sums_of_rows(logits: torch.Tensor, targets: torch.Tensor, vocabulary: Vocabulary, entropy: bool) -> torch.Tensor:
    """[c, v], [c] -> [3 or 4, c] fp32 of this rank's columns: peak, sum exp s, logit of the target where it is here,
    and for the entropy sum exp(s) * s."""
    if logits.is_cuda:
        from swift_megatron_grpo.training.head import softmax_triton

        return softmax_triton.sums_of_rows(logits, targets, vocabulary, entropy)
    sums = torch.empty(4 if entropy else 3, len(logits), device=logits.device)
    for part in _that_fit_a_cache(logits):
        sums[:, part] = _sums_in_torch(logits[part], targets[part] - vocabulary.first, vocabulary, entropy)
    return sums


def _sums_in_torch(logits: torch.Tensor, local: torch.Tensor, vocabulary: Vocabulary, entropy: bool) -> torch.Tensor:
    here = (local >= 0) & (local < vocabulary.real)
    index = local.clamp(0, logits.shape[1] - 1)
    target = logits.gather(1, index[:, None])[:, 0].float().masked_fill(~here, LOWEST)
    if vocabulary.real == 0:
        nothing = torch.zeros_like(target)
        sums = [nothing + LOWEST, nothing, target, nothing]
    else:
        columns = logits[:, : vocabulary.real]
        peak = columns.amax(-1).float()
        s = torch.sub(columns, peak[:, None]).div_(vocabulary.temperature)  # fp32 whatever the logits are
        e = s.exp()
        sums = [peak, e.sum(-1), target]
        if entropy:
            sums.append(e.mul_(s.clamp_(min=LOWEST)).sum(-1))
    return torch.stack(sums[: 4 if entropy else 3])


def over_ranks(sums: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """The sums of every rank, [ranks] of [3 or 4, c]. One exchange, where a maximum and then a sum would be two."""
    if group is None or sums.shape[1] == 0:
        return [sums]
    parts = [torch.empty_like(sums) for _ in range(group.size())]
    dist.all_gather(parts, sums, group=group)
    return parts


def combine(parts: Sequence[torch.Tensor], temperature: float) -> RowStats:
    """What all ranks computed from their columns -> the statistics of whole rows."""
    stacked = torch.stack(list(parts), 1)  # [3 or 4, ranks, c]
    peaks, totals, targets = stacked[0], stacked[1], stacked[2]
    peak = peaks.amax(0)
    shift = ((peaks - peak) / temperature).clamp_(min=LOWEST)  # [ranks, c]
    rescale = shift.exp()
    total = (totals * rescale).sum(0)
    log_total = total.log()
    logprob = (targets.amax(0) - peak) / temperature - log_total
    if len(stacked) == 3:
        return RowStats(logprob, peak, log_total, None)
    weighted = ((stacked[3] + shift * totals) * rescale).sum(0)
    return RowStats(logprob, peak, log_total, log_total - weighted / total)


def to_gradient_(
    logits: torch.Tensor, targets: torch.Tensor, stats: RowStats, upstream: torch.Tensor, vocabulary: Vocabulary
) -> torch.Tensor:
    """Overwrites logits [c, v] with the gradient of sum(upstream * columns) by them; upstream is [c, 1 or 2]."""
    if logits.is_cuda:
        from swift_megatron_grpo.training.head import softmax_triton

        return softmax_triton.to_gradient_(logits, targets, stats, upstream, vocabulary)
    for part in _that_fit_a_cache(logits):
        local = targets[part] - vocabulary.first
        _to_gradient_in_torch_(logits[part], local, stats.of(part), upstream[part], vocabulary)
    return logits


def _to_gradient_in_torch_(
    logits: torch.Tensor, local: torch.Tensor, stats: RowStats, upstream: torch.Tensor, vocabulary: Vocabulary
) -> None:
    of_logprob, of_entropy = upstream[:, :1], upstream[:, 1:]
    columns = logits[:, : vocabulary.real]
    logp = torch.sub(columns, stats.peak[:, None]).div_(vocabulary.temperature).sub_(stats.log_total[:, None])
    if stats.entropy is None:
        grad = logp.exp_().mul_(-of_logprob)  # by s, as long as it is not divided by the temperature
    else:
        grad = logp.exp().mul_(logp.clamp_(min=LOWEST).add_(stats.entropy[:, None]).mul_(-of_entropy).sub_(of_logprob))
    here = ((local >= 0) & (local < vocabulary.real)).nonzero()[:, 0]
    grad[here, local[here]] += of_logprob[here, 0]
    columns.copy_(grad.div_(vocabulary.temperature))
    logits[:, vocabulary.real :] = 0


def _that_fit_a_cache(logits: torch.Tensor) -> Iterator[slice]:
    """Rows at a time: their fp32 copies are made and used within a CPU core's cache."""
    count = max(1, 2**17 // logits.shape[1])
    return (slice(begin, begin + count) for begin in range(0, len(logits), count))
