"""The rule that decides which rollouts may start ahead of training, and how stale they are. Decisions only.

Rollouts are numbered, and each is trained for the same number of optimizer steps. The version of weights is the number
of optimizer steps behind them. The staleness of a rollout is the number of rollouts trained between the weights that
generate it and itself; in a synchronous run it is 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from swift_megatron_grpo.packing.bins import Ints, sums
from swift_megatron_grpo.packing.completions import spans
from swift_megatron_grpo.types import Rollout

Versions = TypeVar("Versions", int, Ints)  # of one completion, or of several


@dataclass(frozen=True, slots=True)
class RunAhead:
    max_staleness: int
    steps_per_rollout: int
    first_rollout: int  # of this run, which may resume an interrupted one
    first_version: int  # of the weights before that rollout
    total_steps: int  # rollouts that would not be trained are not generated

    def staleness(self, rollout: int, version: Versions) -> Versions:
        """Return the staleness of completions by these weights, which count as those before a rollout in training."""
        trained = (version - self.first_version) // self.steps_per_rollout
        return rollout - self.first_rollout - trained

    def in_window(self, rollout: int, training: int) -> bool:
        """Return True if this rollout may be generated while rollout `training` is trained."""
        first_step = self.first_version + (rollout - self.first_rollout) * self.steps_per_rollout
        return first_step < self.total_steps and rollout - training <= self.max_staleness

    def metrics(self, number: int, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the staleness of the tokens of a rollout: means of completions, the most, and the share of each."""
        numbers, versions, tokens = spans(rollouts)
        ages = self.staleness(number, versions)
        of_completions = sums(numbers, tokens, len(rollouts))
        means = sums(numbers, ages * tokens, len(rollouts)) / np.maximum(of_completions, 1)
        all_tokens = max(int(tokens.sum()), 1)
        shares = {
            f"rollout/staleness_{age}_frac": int(tokens[ages == age].sum()) / all_tokens
            for age in range(self.max_staleness + 1)
        }
        of_other_weights = (np.diff(numbers) == 0) & (np.diff(versions) != 0)  # than the span before it
        return shares | {
            "rollout/staleness": math.fsum(means.tolist()) / len(means),
            "rollout/staleness_max": int(ages.max()),
            "rollout/several_weights": len(np.unique(numbers[1:][of_other_weights])),
        }

    def may_start(self, rollout: int, engine_version: int, newest: int, idle: bool) -> bool:
        """Return True if the weights that would generate a rollout in the window are new enough.

        An idle engine is sent the newest weights first, and in flight a busy one as well. Otherwise it keeps its
        weights; if they are too old for this rollout, it waits until the engine is idle.
        """
        version = newest if idle else engine_version
        return self.staleness(rollout, version) <= self.max_staleness
