"""Conditions under which a run stops learning, found in the metrics that it logs, each in one sentence (pure Python).

docs/metrics.md#stalled-runs says which runs the thresholds come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Bounds on means over logged values."""

    window: int = 20  # values of a mean
    equal_window: int = 60  # values of a mean in which most groups are equal; all groups: `window`
    equal: float = 0.85  # share of equal groups that is too large while the reward does not rise
    rise: float = 0.1  # of the reward from the first half of `equal_window` to the second, as a share of it
    quiet: int = 60  # logged steps without a stall after which it has ended
    fall_noise: float = 3.0  # fall of the reward, in standard deviations between steps
    fall_share: float = 0.2  # and as a share of the best reward
    growth: float = 2.0  # length by the shortest mean so far
    cut: float = 0.3  # share of completions that are cut off
    entropy: float = 0.1  # entropy by the first mean
    k3_window: int = 5  # values of a median: by default only every 10th rollout has one
    k3_growth: float = 5.0  # k3_kl by the first median
    k3: float = 0.01


def _windows(series: Series, size: int) -> list[Series]:
    """Return the whole windows from the start on, which do not overlap."""
    return [series[end - size : end] for end in range(size, len(series) + 1, size)]


def _equal_groups(columns: Columns, limits: Thresholds) -> str | None:
    shares, rewards = columns["frac_reward_zero_std"], columns["reward"]
    if _are_all_equal(shares, limits):
        size = limits.window
    elif _are_mostly_equal(shares, rewards, limits):
        size = limits.equal_window
    else:
        return None
    return (
        f"{fmean(shares[-size:]):.0%} of the groups of the last {size} logged rollouts have equal rewards, so no "
        "gradient: use --dynamic_sample true, a higher --temperature, more --num_generations, or prompts that are "
        "neither too easy nor too hard"
    )


def _are_all_equal(shares: Series, limits: Thresholds) -> bool:
    return len(shares) >= limits.window and min(shares[-limits.window :]) > 0.999


def _are_mostly_equal(shares: Series, rewards: Series, limits: Thresholds) -> bool:
    size, half = limits.equal_window, limits.equal_window // 2
    if min(len(shares), len(rewards)) < size or fmean(shares[-size:]) < limits.equal:
        return False
    earlier, later = fmean(rewards[-size:-half]), fmean(rewards[-half:])
    return later - earlier <= limits.rise * abs(earlier)


def _reward_falls(columns: Columns, limits: Thresholds) -> str | None:
    rewards, size = columns["reward"], limits.window
    if len(rewards) < 2 * size:
        return None
    best, last = max(_windows(rewards, size), key=fmean), rewards[-size:]
    high, low = fmean(best), fmean(last)
    noise = max(pstdev(best), pstdev(last))
    if high - low <= max(limits.fall_noise * noise, limits.fall_share * abs(high)):
        return None
    return (
        f"the reward has fallen from {high:.3g} to {low:.3g}, in means over {size} logged rollouts: continue from an "
        "earlier checkpoint with a lower --lr, or with a larger --beta, which holds the policy near the reference"
    )


def _lengths_explode(columns: Columns, limits: Thresholds) -> str | None:
    lengths, size = columns["completions/mean_length"], limits.window
    cut = columns["completions/clipped_ratio"][-size:]
    if len(lengths) < 2 * size or len(cut) < size:
        return None
    low, last = min(map(fmean, _windows(lengths, size))), fmean(lengths[-size:])
    if last < limits.growth * low or fmean(cut) < limits.cut:
        return None
    return (
        f"completions have grown from {low:.0f} to {last:.0f} tokens and {fmean(cut):.0%} are cut off: use "
        "--reward_funcs soft_overlong with --soft_cache_length, --overlong_filter true, or a larger "
        "--max_completion_length"
    )


def _entropy_collapses(columns: Columns, limits: Thresholds) -> str | None:
    entropies, size = columns["entropy/entropy_mean"], limits.window
    if len(entropies) < 2 * size:
        return None
    first, last = fmean(entropies[:size]), fmean(entropies[-size:])
    if last >= limits.entropy * first:
        return None
    return (
        f"the policy's entropy has fallen from {first:.2g} to {last:.2g} nats, so its completions are nearly the same: "
        "use --epsilon_high 0.28, --entropy_coef 0.001, a higher --temperature or a lower --lr"
    )


def _engine_drifts(columns: Columns, limits: Thresholds) -> str | None:
    values, size = columns["rollout/k3_kl"], limits.k3_window
    if len(values) < 2 * size:
        return None
    first, last = median(values[:size]), median(values[-size:])
    if last < max(limits.k3, limits.k3_growth * first):
        return None
    return (
        f"rollout/k3_kl has grown from {first:.2g} to {last:.2g}, so vLLM samples from another policy than the "
        "trainer's: use --rollout_importance_sampling_mode token_truncate, a smaller --max_staleness or a lower --lr"
    )


_KINDS: tuple[Callable[[Columns, Thresholds], str | None], ...] = (
    _equal_groups, _reward_falls, _lengths_explode, _entropy_collapses, _engine_drifts,
)  # fmt: skip
_LIMITS = Thresholds()


def find_stalls(columns: Columns, limits: Thresholds = _LIMITS) -> dict[str, str]:
    """Return a sentence for each kind of stall that the newest values show, by the name of the kind."""
    found = {kind.__name__: kind(columns, limits) for kind in _KINDS}
    return {name: sentence for name, sentence in found.items() if sentence is not None}


class StallWatch:
    """Report a stall once, and again only after it has ended."""

    def __init__(self, earlier: Mapping[str, Sequence[float | None]], limits: Thresholds = _LIMITS) -> None:
        """`earlier`: metrics that a run which resumes has logged; what they show has been reported."""
        self._limits = limits
        self._columns = {name: [x for x in earlier.get(name, ()) if x is not None] for name in _METRICS}
        self._absent = dict.fromkeys(find_stalls(self._columns, limits), 0)  # rows since a stall was seen, by its kind

    def report(self, row: Mapping[str, Any]) -> list[str]:
        """Add the metrics of a logged step, and return the sentences of the stalls that are new."""
        for name, column in self._columns.items():
            column += [value for value in [finite(row.get(name))] if value is not None]
        found = find_stalls(self._columns, self._limits)
        new = [sentence for name, sentence in found.items() if name not in self._absent]
        counts = {name: count + 1 for name, count in self._absent.items() if count < self._limits.quiet}
        self._absent = counts | dict.fromkeys(found, 0)
        return new
