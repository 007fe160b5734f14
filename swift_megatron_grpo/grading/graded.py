"""Graded completions as arrays, and objects of those that are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np

from swift_megatron_grpo.grading.columns import Rewards
from swift_megatron_grpo.grading.scores import Scores
from swift_megatron_grpo.packing.arrays import Columns
from swift_megatron_grpo.packing.bins import Bools, Floats, Ints, Objects
from swift_megatron_grpo.packing.completions import OutlinedRollouts
from swift_megatron_grpo.types import Graded, Rollout


@dataclass(frozen=True, slots=True)
class Outcomes(Columns):
    """The parts of graded completions that their metrics need, without their tokens, each [n]."""

    scores: Scores
    rewards: Rewards  # weighted sums
    lengths: Ints  # tokens that the policy sampled
    truncated: Bools
    infos: Objects  # of ms-swift's schedulers; None or {}: there are none
    sequences: Ints

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], scores: Scores, rewards: Rewards) -> Outcomes:
        if isinstance(rollouts, OutlinedRollouts):
            facts = rollouts.facts
            infos = np.full(len(rollouts), None)
            for place in facts.rare.nonzero()[0].tolist():
                _, infos[place], _ = facts.rare[place]
            return cls(scores, rewards, facts.sampled, facts.truncated, infos, np.ones(len(rollouts), np.int64))
        return cls(
            scores,
            rewards,
            lengths=np.array([rollout.length for rollout in rollouts], np.int64),
            truncated=np.array([rollout.truncated for rollout in rollouts], np.bool_),
            infos=np.fromiter((rollout.infos for rollout in rollouts), np.object_, len(rollouts)),
            sequences=np.array([1 + len(rollout.earlier) for rollout in rollouts], np.int64),
        )


@dataclass(frozen=True, slots=True, eq=False)
class GradedRollouts(Columns, Sequence[Graded]):
    """Completions with their rewards and advantages. An object is made whenever one is read."""

    rollouts: Sequence[Rollout]
    outcomes: Outcomes
    advantages: Floats

    @classmethod
    def of(cls, graded: Iterable[Graded], functions: int) -> GradedRollouts:
        """Return these objects as arrays; each has the scores of so many reward functions."""
        every = list(graded)
        rollouts = [one.rollout for one in every]
        scores = Scores.of([one.rewards for one in every], functions)
        outcomes = Outcomes.of(rollouts, scores, Rewards.of([one.reward for one in every]))
        return cls(rollouts, outcomes, np.array([one.advantage for one in every], np.float64))

    @overload
    def __getitem__(self, place: int) -> Graded: ...
    @overload
    def __getitem__(self, place: slice) -> GradedRollouts: ...
    def __getitem__(self, place: int | slice) -> Graded | GradedRollouts:
        places = range(len(self))[place]
        if isinstance(places, range):
            return self.pick(np.array(places, np.int64))
        outcomes = self.outcomes
        reward, advantage = outcomes.rewards.at(places), float(self.advantages[places])
        return Graded(self.rollouts[places], outcomes.scores.row(places), reward, advantage)

    def with_rewards(self, rewards: Rewards) -> GradedRollouts:
        return replace(self, outcomes=replace(self.outcomes, rewards=rewards))

    def with_advantages(self, advantages: Floats) -> GradedRollouts:
        return replace(self, advantages=advantages)
