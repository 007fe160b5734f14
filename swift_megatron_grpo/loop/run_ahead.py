"""Which rollout may begin, and how stale it would be: the decisions alone.

Rollouts are numbered, and each is trained for the same number of optimizer steps. Weights have a version: the steps
they have behind them. A rollout is as stale as the number of rollouts that are trained between the weights that
generate it and itself; those of a synchronous run have a staleness of 0.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunAhead:
    max_staleness: int
    steps_per_rollout: int
    first_rollout: int  # of this run, which may go on where another one was interrupted
    first_version: int  # the steps behind the weights before that rollout
    steps_in_all: int  # nothing is generated that is not trained

    def staleness(self, rollout: int, version: int) -> int:
        """Of completions by weights of this version. A resumed run may begin in the middle of a rollout; weights that
        have seen a part of it count as those from before it."""
        trained = (version - self.first_version) // self.steps_per_rollout
        return rollout - self.first_rollout - trained

    def wants(self, rollout: int, training: int) -> bool:
        """Whether it is one of those that may be begun while rollout `training` is trained."""
        first_step = self.first_version + (rollout - self.first_rollout) * self.steps_per_rollout
        return first_step < self.steps_in_all and rollout - training <= self.max_staleness

    def may_begin(self, rollout: int, engine_version: int, newest: int, idle: bool) -> bool:
        """One that is wanted. An engine that answers nothing is sent the newest weights first; one that is busy goes
        on with those it has, and where they are too old for this rollout it waits until the engine is idle."""
        version = newest if idle else engine_version
        return self.staleness(rollout, version) <= self.max_staleness
