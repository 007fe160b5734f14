"""Histograms of the rewards and lengths of completions: the first rollouts against the newest."""

from collections.abc import Callable, Sequence
from typing import Any

from swift_megatron_grpo.output.report.completions import Completion, Completions

BINS = 24
_SHARE = 5  # first and newest: a fifth of the rollouts each


def counts(values: Sequence[float], low: float, high: float, bins: int) -> list[int]:
    """Count the values in each bin; the last bin includes `high`."""
    result = [0] * bins
    for value in values:
        result[min(int((value - low) / (high - low) * bins), bins - 1)] += 1
    return result


def histogram(name: str, first: Sequence[float], newest: Sequence[float], bins: int = BINS) -> dict[str, Any] | None:
    """Return counts of both distributions in the same bins of equal width from `low` to `high`; None without values."""
    values = [*first, *newest]
    if not values:
        return None
    low, high = min(values), max(values)
    if low == high:
        margin = max(0.5, abs(low) * 1e-6)  # 0.5 alone would be lost next to a large number
        low, high = low - margin, high + margin
    shared = (low, high, bins)
    return {"name": name, "low": low, "high": high, "first": counts(first, *shared), "newest": counts(newest, *shared)}


def split(completions: Completions) -> tuple[list[Completion], list[Completion], str, str]:
    """Return the completions of the first and of the newest rollouts, and the names of both."""
    rollouts = sorted({row.rollout for row in completions.rows})
    size = max(1, len(rollouts) // _SHARE)
    first, newest = rollouts[:size] if len(rollouts) > 1 else [], rollouts[-size:]
    early, late = ([row for row in completions.rows if row.rollout in part] for part in (first, newest))
    return early, late, _label(first), _label(newest)


def _label(rollouts: Sequence[int]) -> str:
    if not rollouts:
        return ""
    return f"rollout {rollouts[0]}" if len(rollouts) == 1 else f"rollouts {rollouts[0]} to {rollouts[-1]}"


def of_completions(completions: Completions) -> dict[str, Any]:
    first, newest, first_label, newest_label = split(completions)

    def compare(name: str, value: Callable[[Completion], float | None]) -> dict[str, Any] | None:
        early, late = ([v for row in rows if (v := value(row)) is not None] for rows in (first, newest))
        return histogram(name, early, late)

    functions = completions.functions if len(completions.functions) > 1 else []
    charts = [
        compare("total reward", lambda row: row.total),
        *(compare(name, lambda row, i=i: row.rewards[i]) for i, name in enumerate(functions)),  # type: ignore[misc]
        compare("completion length, tokens", lambda row: row.tokens),
    ]
    return {"first": first_label, "newest": newest_label, "charts": [chart for chart in charts if chart is not None]}
