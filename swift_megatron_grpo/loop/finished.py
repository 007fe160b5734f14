"""Completions by the index of their request: as a generation finishes them, and with their scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from swift_megatron_grpo.generation.interface import Share
from swift_megatron_grpo.grading.scores import ScoreRow, Scores
from swift_megatron_grpo.packing.arrays import Columns
from swift_megatron_grpo.packing.bins import Ints
from swift_megatron_grpo.types import Rollout


@dataclass(frozen=True, slots=True)
class Finished(Columns):
    """Completions in whole groups, whose members are neighbours."""

    indices: Ints
    rollouts: Sequence[Rollout]

    @classmethod
    def of(cls, rollouts: Mapping[int, Rollout]) -> Finished:
        return cls(np.array(list(rollouts), np.int64), list(rollouts.values()))

    def graders(self, group_size: int, ranks: int) -> Ints:
        """Return the rank that grades each completion: an equal share of the groups, on which most of them are."""
        groups = range(len(self) // group_size)
        shares = [len(Share(rank, ranks, reports=True).pick(groups)) for rank in range(ranks)]
        return np.repeat(np.arange(ranks), np.array(shares) * group_size)


NONE_FINISHED = Finished(np.zeros(0, np.int64), ())


@dataclass(frozen=True, slots=True)
class Scored(Columns):
    """Completions with the scores of the reward functions."""

    indices: Ints
    rollouts: Sequence[Rollout]
    scores: Scores

    @classmethod
    def of(cls, recorded: Mapping[int, tuple[Rollout, ScoreRow]], functions: int) -> Scored:
        """Return completions that were graded before, by so many functions."""
        finished = Finished.of({index: rollout for index, (rollout, _) in recorded.items()})
        return cls(finished.indices, finished.rollouts, Scores.of([row for _, row in recorded.values()], functions))

    def between(self, begin: int, end: int) -> Scored:
        """Return the completions with these indices in their order; the index `begin` becomes 0."""
        [places] = ((begin <= self.indices) & (self.indices < end)).nonzero()
        places = places[np.argsort(self.indices[places])]
        chosen = self if np.array_equal(places, np.arange(len(self))) else self.pick(places)
        return replace(chosen, indices=chosen.indices - begin)

    def rows(self) -> Iterator[tuple[Rollout, ScoreRow]]:
        return ((rollout, self.scores.row(place)) for place, rollout in enumerate(self.rollouts))
