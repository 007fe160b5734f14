"""The arithmetic of the head: rows of logits to log-probs of targets and entropies, and back to gradients.

For one row, with l: the logits of the whole vocabulary, t: the target, T: the temperature, all in fp32:

    s[j] = (l[j] - peak) / T                 peak = max l, so that exp never overflows
    log p[j] = s[j] - log_total              log_total = log sum exp s
    H = log_total - sum(exp(s) * s) / sum(exp(s))
    d logp[t] / d l[j] = ((j == t) - p[j]) / T
    d H       / d l[j] = -p[j] * (log p[j] + H) / T

A tensor-parallel rank sums over its columns relative to its own peak (`sums_of_rows`), all ranks exchange these few
numbers per row (`over_ranks`), and each computes the same statistics from them (`combine`). Columns that only pad the
vocabulary are ignored. On CUDA the two functions that read and write logits are Triton kernels (softmax_triton.py).

c: rows; v: vocabulary columns of this rank, padding included.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from swift_megatron_grpo.training.head.row_statistics import LOWEST, RowStats, Vocabulary


def stats_of_rows(logits: torch.Tensor, targets: torch.Tensor, vocabulary: Vocabulary, entropy: bool) -> RowStats:
    """Compute the statistics of logits [c, v], which are not changed, with targets [c], over tensor-parallel ranks."""
    sums = sums_of_rows(logits, targets, vocabulary, entropy)
    return combine(over_ranks(sums, vocabulary.group), vocabulary.temperature)


def sums_of_rows(logits: torch.Tensor, targets: torch.Tensor, vocabulary: Vocabulary, entropy: bool) -> torch.Tensor:
    """Compute the sums over this rank's columns: logits [c, v], targets [c] -> [3 or 4, c] fp32.

    They are the peak, sum exp s, the target's logit (LOWEST if another rank has it) and, for entropy, sum exp(s) * s.
    """
    if logits.is_cuda:
        from swift_megatron_grpo.training.head import softmax_triton

        return softmax_triton.sums_of_rows(logits, targets, vocabulary, entropy)
    sums = torch.empty(4 if entropy else 3, len(logits), device=logits.device)
    for block in _blocks_that_fit_a_cache(logits):
        sums[:, block] = _sums_in_torch(logits[block], targets[block] - vocabulary.first, vocabulary, entropy)
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
        s = torch.sub(columns, peak[:, None]).div_(vocabulary.temperature)  # fp32 for every type of logits
        e = s.exp()
        sums = [peak, e.sum(-1), target]
        if entropy:
            sums.append(e.mul_(s.clamp_(min=LOWEST)).sum(-1))
    return torch.stack(sums[: 4 if entropy else 3])


def over_ranks(sums: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Gather the sums of all ranks, each [3 or 4, c], in one exchange; a maximum and then a sum would take two."""
    if group is None or sums.shape[1] == 0:
        return [sums]
    gathered = [torch.empty_like(sums) for _ in range(group.size())]
    dist.all_gather(gathered, sums, group=group)
    return gathered


def combine(sums: Sequence[torch.Tensor], temperature: float) -> RowStats:
    """Combine the sums of all ranks into the statistics of whole rows."""
    stacked = torch.stack(list(sums), 1)  # [3 or 4, ranks, c]
    peaks, totals, targets = stacked[:3]
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
    """Overwrite logits [c, v] with the gradient of sum(upstream * RowStats.columns()); upstream is [c, 1 or 2]."""
    if logits.is_cuda:
        from swift_megatron_grpo.training.head import softmax_triton

        return softmax_triton.to_gradient_(logits, targets, stats, upstream, vocabulary)
    for block in _blocks_that_fit_a_cache(logits):
        local = targets[block] - vocabulary.first
        _to_gradient_in_torch_(logits[block], local, stats.of(block), upstream[block], vocabulary)
    return logits


def _to_gradient_in_torch_(
    logits: torch.Tensor, local: torch.Tensor, stats: RowStats, upstream: torch.Tensor, vocabulary: Vocabulary
) -> None:
    of_logprob = upstream[:, :1]
    of_entropy = upstream[:, 1:]
    columns = logits[:, : vocabulary.real]
    logp = torch.sub(columns, stats.peak[:, None]).div_(vocabulary.temperature).sub_(stats.log_total[:, None])
    if stats.entropy is None:
        grad = logp.exp_().mul_(-of_logprob)  # with respect to s: the division by the temperature follows below
    else:
        grad = logp.exp().mul_(logp.clamp_(min=LOWEST).add_(stats.entropy[:, None]).mul_(-of_entropy).sub_(of_logprob))
    here = ((local >= 0) & (local < vocabulary.real)).nonzero()[:, 0]
    grad[here, local[here]] += of_logprob[here, 0]
    columns.copy_(grad.div_(vocabulary.temperature))
    logits[:, vocabulary.real :] = 0


def _blocks_that_fit_a_cache(logits: torch.Tensor) -> Iterator[slice]:
    """Return slices of rows whose fp32 copies fit into a CPU core's cache."""
    count = max(1, 2**17 // logits.shape[1])
    return (slice(begin, begin + count) for begin in range(0, len(logits), count))
