"""Conditions under which a run stops learning, found in the metrics that it logs, each in one sentence (pure Python).

docs/metrics.md#stalled-runs says which runs the thresholds come from.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median, pstdev
from typing import Any

from swift_megatron_grpo.output.report.run_files import finite

Series = Sequence[float]
Columns = Mapping[str, Series]  # the finite values of each metric, in the order of the steps that have one

_METRICS = (
    "reward",
    "frac_reward_zero_std",
    "completions/mean_length",
    "completions/clipped_ratio",
    "entropy/entropy_mean",
    "rollout/k3_kl",
)


# Bounds on means over logged values, and the numbers of values that they are of.
_WINDOW = 20
_EQUAL_WINDOW = 60  # for most groups being equal; for all groups: _WINDOW
_EQUAL = 0.85  # share of equal groups that is too large while the reward does not rise
_RISE = 0.1  # of the reward from the first half of _EQUAL_WINDOW to the second, as a share of it
_QUIET = 60  # logged steps without a stall after which it has ended
_FALL_NOISE = 3.0  # fall of the reward, in standard deviations between steps
_FALL_SHARE = 0.2  # and as a share of the best reward
_GROWTH = 2.0  # length by the shortest mean so far
_CUT = 0.3  # share of completions that are cut off
_ENTROPY = 0.1  # entropy by the first mean
_K3_WINDOW = 5  # values of a median: by default only every 10th rollout has one
_K3_GROWTH = 5.0  # k3_kl by the first median
_K3 = 0.01


def _windows(series: Series, size: int) -> list[Series]:
    """Return the whole windows from the start on, which do not overlap."""
    return [series[end - size : end] for end in range(size, len(series) + 1, size)]


def _equal_groups(columns: Columns) -> str | None:
    shares, rewards, size = columns["frac_reward_zero_std"], columns["reward"], _WINDOW
    if len(shares) < size or min(shares[-size:]) <= 0.999:
        size, half = _EQUAL_WINDOW, _EQUAL_WINDOW // 2
        if min(len(shares), len(rewards)) < size or fmean(shares[-size:]) < _EQUAL:
            return None
        earlier, later = fmean(rewards[-size:-half]), fmean(rewards[-half:])
        if later - earlier > _RISE * abs(earlier):
            return None
    return (
        f"{fmean(shares[-size:]):.0%} of the groups of the last {size} logged rollouts have equal rewards, so no "
        "gradient: use --dynamic_sample true, a higher --temperature, more --num_generations, or prompts that are "
        "neither too easy nor too hard"
    )


def _reward_falls(columns: Columns) -> str | None:
    rewards, size = columns["reward"], _WINDOW
    if len(rewards) < 2 * size:
        return None
    best, last = max(_windows(rewards, size), key=fmean), rewards[-size:]
    high, low = fmean(best), fmean(last)
    noise = max(pstdev(best), pstdev(last))
    if high - low <= max(_FALL_NOISE * noise, _FALL_SHARE * abs(high)):
        return None
    return (
        f"the reward has fallen from {high:.3g} to {low:.3g}, in means over {size} logged rollouts: continue from an "
        "earlier checkpoint with a lower --lr, or with a larger --beta, which holds the policy near the reference"
    )


def _lengths_explode(columns: Columns) -> str | None:
    lengths, size = columns["completions/mean_length"], _WINDOW
    cut = columns["completions/clipped_ratio"][-size:]
    if len(lengths) < 2 * size or len(cut) < size:
        return None
    low, last = min(map(fmean, _windows(lengths, size))), fmean(lengths[-size:])
    if last < _GROWTH * low or fmean(cut) < _CUT:
        return None
    return (
        f"completions have grown from {low:.0f} to {last:.0f} tokens and {fmean(cut):.0%} are cut off: use "
        "--reward_funcs soft_overlong with --soft_cache_length, --overlong_filter true, or a larger "
        "--max_completion_length"
    )


def _entropy_collapses(columns: Columns) -> str | None:
    entropies, size = columns["entropy/entropy_mean"], _WINDOW
    if len(entropies) < 2 * size:
        return None
    first, last = fmean(entropies[:size]), fmean(entropies[-size:])
    if last >= _ENTROPY * first:
        return None
    return (
        f"the policy's entropy has fallen from {first:.2g} to {last:.2g} nats, so its completions are nearly the same: "
        "use --epsilon_high 0.28, --entropy_coef 0.001, a higher --temperature or a lower --lr"
    )


def _engine_drifts(columns: Columns) -> str | None:
    values, size = columns["rollout/k3_kl"], _K3_WINDOW
    if len(values) < 2 * size:
        return None
    first, last = median(values[:size]), median(values[-size:])
    if last < max(_K3, _K3_GROWTH * first):
        return None
    return (
        f"rollout/k3_kl has grown from {first:.2g} to {last:.2g}, so vLLM samples from another policy than the "
        "trainer's: use --rollout_importance_sampling_mode token_truncate, a smaller --max_staleness or a lower --lr"
    )


_KINDS: tuple[Callable[[Columns], str | None], ...] = (
    _equal_groups, _reward_falls, _lengths_explode, _entropy_collapses, _engine_drifts,
)  # fmt: skip


def find_stalls(columns: Columns) -> dict[str, str]:
    """Return a sentence for each kind of stall that the newest values show, by the name of the kind."""
    found = {kind.__name__: kind(columns) for kind in _KINDS}
    return {name: sentence for name, sentence in found.items() if sentence is not None}


class StallWatch:
    """Report a stall once, and again only after it has ended."""

    def __init__(self, earlier: Mapping[str, Sequence[float | None]]) -> None:
        """`earlier`: metrics that a run which resumes has logged; what they show has been reported."""
        self._columns = {name: [x for x in earlier.get(name, ()) if x is not None] for name in _METRICS}
        self._absent = dict.fromkeys(find_stalls(self._columns), 0)  # rows since a stall was seen, by its kind

    def report(self, row: Mapping[str, Any]) -> list[str]:
        """Add the metrics of a logged step, and return the sentences of the stalls that are new."""
        for name, column in self._columns.items():
            column += [value for value in [finite(row.get(name))] if value is not None]
        found = find_stalls(self._columns)
        new = [sentence for name, sentence in found.items() if name not in self._absent]
        counts = {name: count + 1 for name, count in self._absent.items() if count < _QUIET}
        self._absent = counts | dict.fromkeys(found, 0)
        return new
