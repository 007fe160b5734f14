"""The scores of completions by reward functions, as an array, and their weighted sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swift_megatron_grpo.grading.columns import Rewards, usable
from swift_megatron_grpo.packing.arrays import Columns
from swift_megatron_grpo.packing.bins import Bools, Floats

ScoreRow = list[float | None]  # one per reward function; None: the function does not apply


@dataclass(frozen=True, slots=True)
class Scores(Columns):
    """The scores of completions by every reward function, [n, functions]."""

    values: Floats  # any number, also NaN; 0 where the function does not apply
    applies: Bools

    @classmethod
    def of(cls, rows: Sequence[Sequence[float | None]], functions: int) -> Scores:
        """Return the scores of these rows, one for each completion."""
        shape = len(rows), functions
        applies = np.array([[score is not None for score in row] for row in rows], np.bool_).reshape(shape)
        return cls(np.where(applies, np.array(rows, np.float64).reshape(shape), 0.0), applies)

    def to_bytes(self) -> tuple[bytes, bytes]:
        """Return a message: thousands of ranks send one, and arrays are slower to read."""
        return self.values.astype("<f8").tobytes(), self.applies.tobytes()

    @classmethod
    def from_bytes(cls, messages: Sequence[tuple[bytes, bytes]], completions: int) -> Scores:
        """Return the scores of all messages, one after the other."""
        values = np.frombuffer(b"".join(values for values, _ in messages), "<f8")
        applies = np.frombuffer(b"".join(applies for _, applies in messages), np.bool_)
        shape = completions, len(values) // max(completions, 1)
        return cls(values.reshape(shape), applies.reshape(shape))

    def row(self, place: int) -> ScoreRow:
        pairs = zip(self.values[place].tolist(), self.applies[place].tolist(), strict=True)
        return [value if applies else None for value, applies in pairs]

    def column(self, function: int) -> Rewards:
        """Return the scores of one function; those that are not finite in fp32 do not count."""
        values = self.values[:, function]
        return Rewards.where(self.applies[:, function] & usable(values), values)


def total_of_scores(scores: Scores, weights: Sequence[float]) -> Rewards:
    """Return the weighted sums of the functions that apply; none without any, or if one returned NaN or infinity."""
    totals = np.zeros(len(scores))
    with np.errstate(invalid="ignore", over="ignore"):  # of scores that are not usable
        for function, weight in enumerate(weights):
            totals += scores.values[:, function] * weight
    are_usable = (usable(scores.values) | ~scores.applies).all(axis=1) & scores.applies.any(axis=1)
    return Rewards.where(are_usable & usable(totals), totals)
