"""Losses and metrics of a user's file (--external_plugins).

Each is tried on a made-up step when it is registered, so that the file is refused before a model loads: its shares must
add up to the same number however completions are packed into micro batches.
"""

import math
from collections.abc import Callable

import torch

from swift_megatron_grpo.packing.collate import collate, count
from swift_megatron_grpo.packing.plan import Alignment
from swift_megatron_grpo.settings.losses import CLIPS_RATIO, LossConfig
from swift_megatron_grpo.training.loss.averages import Average
from swift_megatron_grpo.training.loss.terms import Metrics, Terms, TokenOutput
from swift_megatron_grpo.training.loss.total import LOSSES, MORE_METRICS, Loss, MetricFunction, PolicyLoss
from swift_megatron_grpo.types import Sample

_LENGTHS = (5, 1, 4, 2)  # of the completions of the made-up step, two for each prompt
_VALUE = "its value"  # of a loss, in the messages of a mistake
_PACKINGS = ([[0, 1, 2, 3]], [[3, 1], [0, 2]])


def register_loss(
    name: str, average: Average, *, clips_ratio: bool = False, reads_entropy: bool = False
) -> Callable[[PolicyLoss], PolicyLoss]:
    """Decorate a function that `--loss_type NAME` selects, in a file of `--external_plugins`.

    It takes `Terms` and the `LossConfig`, and returns a value per trained token, [m], and metrics as in
    `register_metric`. `average` is over_sequences, over_tokens or over_budget. `clips_ratio`: it reads `config.delta`
    and `config.dual_clip`, which are refused with other losses. `reads_entropy`: `terms.entropy` is computed for it.
    """

    def register(policy: PolicyLoss) -> PolicyLoss:
        if name in LOSSES:
            raise ValueError(f"there is a loss {name!r} already; use another name")

        def share(terms: Terms, config: LossConfig) -> Metrics:
            per_token, metrics = policy(terms, config)
            if per_token.shape != terms.logprobs.shape or not per_token.requires_grad:
                raise ValueError(
                    f"loss {name!r} returns a tensor of shape {list(per_token.shape)}; return a value with a gradient "
                    f"for each of the {len(terms.logprobs)} trained tokens, as terms.logprobs has"
                )
            return {**metrics, _VALUE: average(per_token, terms.rows, terms.batch, config).detach()}

        _try(f"loss {name!r}", share, LossConfig(loss_type=name, beta=0.0), reads_entropy)
        LOSSES[name] = Loss(policy, average, reads_entropy)
        CLIPS_RATIO[name] = clips_ratio
        return policy

    return register


def register_metric(metric: MetricFunction) -> MetricFunction:
    """Decorate a function that returns metrics to log, with every loss, in a file of `--external_plugins`.

    It takes `Terms` and the `LossConfig`, and returns tensors without dimensions by name: the micro batch's share of a
    value of the whole step, from token_mean or sequence_mean, or an extreme whose name ends in _max or _min.
    """
    _try(f"metric {metric.__name__!r}", metric, LossConfig(beta=0.0))
    MORE_METRICS.append(metric)
    return metric


def _try(what: str, compute: MetricFunction, config: LossConfig, entropy: bool = False) -> None:
    """Raise ValueError unless shares are finite, and those of two micro batches add up to that of one."""
    whole, split = ([_made_up_terms(indices, entropy) for indices in packing] for packing in _PACKINGS)
    totals = [_add(what, [compute(terms, config) for terms in packing]) for packing in (whole, split)]
    for key, value in totals[0].items():
        other = totals[1].get(key, math.nan)
        if not math.isclose(value, other, rel_tol=1e-4, abs_tol=1e-6):
            raise ValueError(
                f"{what}: {key} is {value:g} in one micro batch and {other:g} in two; divide by counts of the step, as "
                "token_mean and sequence_mean do, and not by those of a micro batch"
            )


def _made_up_terms(indices: list[int], entropy: bool) -> Terms:
    """Return a micro batch of an off-policy step, with advantages of both signs."""
    now = [[-1.5 + math.sin(10 * i + t) for t in range(length)] for i, length in enumerate(_LENGTHS)]

    def of_another_policy(i: int, shift: float) -> list[float]:
        return [value + math.cos(7 * i + t + shift) / 3 for t, value in enumerate(now[i])]

    samples = [
        Sample(
            tokens=[1] * (1 + length),
            completion_mask=[False] + [True] * length,
            advantage=(1.0, -0.5)[i % 2],
            group=i // 2,
            old_logprobs=of_another_policy(i, 0),
            ref_logprobs=of_another_policy(i, 1),
            rollout_logprobs=of_another_policy(i, 2),
        )
        for i, length in enumerate(_LENGTHS)
    ]
    batch = collate(samples, indices, count(samples), Alignment(1, 1), 0, 1, torch.device("cpu"))
    logprobs = torch.tensor([value for i in indices for value in now[i]], requires_grad=True)
    return Terms.of(batch, TokenOutput(logprobs, -logprobs if entropy else None), LossConfig(beta=0.0))


def _add(what: str, micro_batches: list[Metrics]) -> dict[str, float]:
    """Reduce the shares of micro batches as the engine does."""
    totals: dict[str, float] = {}
    for key, share in ((key, share) for metrics in micro_batches for key, share in metrics.items()):
        if not isinstance(share, torch.Tensor) or share.ndim or share.requires_grad:
            raise ValueError(
                f"{what}: {key} must be a detached tensor without dimensions; use token_mean or sequence_mean"
            )
        combine = max if key.endswith("_max") else min if key.endswith("_min") else float.__add__
        totals[key] = combine(totals[key], share.item()) if key in totals else share.item()
    return totals
