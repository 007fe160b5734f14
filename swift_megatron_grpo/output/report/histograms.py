"""Histograms of the rewards and lengths of completions: the first rollouts against the newest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swift_megatron_grpo.output.report.completions import Completion, Completions

BINS = 24
_SHARE = 5  # first and newest: a fifth of the rollouts each


@dataclass(frozen=True)
class Histogram:
    """Counts in bins of equal width from `low` to `high`."""

    name: str
    low: float
    high: float
    first: list[int]
    newest: list[int]


def counts(values: Sequence[float], low: float, high: float, bins: int) -> list[int]:
    """Count the values in each bin; the last bin includes `high`."""
    result = [0] * bins
    for value in values:
        result[min(int((value - low) / (high - low) * bins), bins - 1)] += 1
    return result


def histogram(name: str, first: Sequence[float], newest: Sequence[float], bins: int = BINS) -> Histogram | None:
    """Return both distributions over the same bins; None without values."""
    values = [*first, *newest]
    if not values:
        return None
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    return Histogram(name, low, high, counts(first, low, high, bins), counts(newest, low, high, bins))


def split(completions: Completions) -> tuple[list[Completion], list[Completion], str, str]:
    """Return the completions of the first and of the newest rollouts, and the names of both."""
    rollouts = sorted({row.rollout for row in completions.rows})
    size = max(1, len(rollouts) // _SHARE)
    first, newest = rollouts[:size], rollouts[-size:]
    if len(rollouts) < 2:
        first = []
    early, late = set(first), set(newest)
    return (
        [row for row in completions.rows if row.rollout in early],
        [row for row in completions.rows if row.rollout in late],
        _label(first),
        _label(newest),
    )


def _label(rollouts: Sequence[int]) -> str:
    if not rollouts:
        return ""
    return f"rollout {rollouts[0]}" if len(rollouts) == 1 else f"rollouts {rollouts[0]} to {rollouts[-1]}"


def of_completions(completions: Completions) -> dict[str, Any]:
    """Return the histograms of the page, as JSON."""
    first, newest, first_label, newest_label = split(completions)

    def compare(name: str, value: Callable[[Completion], float | None]) -> list[Histogram]:
        early, late = ([v for row in rows if (v := value(row)) is not None] for rows in (first, newest))
        made = histogram(name, early, late)
        return [] if made is None else [made]

    has_tokens = any(row.tokens is not None for row in completions.rows)
    length = "completion length, tokens" if has_tokens else "completion length, characters"
    made = compare("total reward", lambda row: row.total)
    if len(completions.functions) > 1:
        for i, name in enumerate(completions.functions):
            made += compare(name, lambda row, i=i: row.rewards[i])  # type: ignore[misc]
    made += compare(length, lambda row: row.tokens if has_tokens else len(row.text))
    return {"first": first_label, "newest": newest_label, "charts": [asdict(one) for one in made]}
