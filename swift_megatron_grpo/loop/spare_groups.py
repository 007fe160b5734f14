"""The number of groups that are generated with a rollout in case some of its own are uniform (--spare_groups).

The groups that --dynamic_sample draws later have a tail of their own in every round. Generated with the rollout, they
fill its tail. They are drawn in the order of their prompts, so the batch is the same, and the rest is dropped.
"""

import math
from collections import deque
from dataclasses import dataclass, field

_MARGIN = 1.15  # over what the past needed on average: another round costs more than some groups too many
_REMEMBERED = 8  # rollouts


@dataclass
class SpareGroups:
    """Nothing of it is in a checkpoint: the number of spare groups changes no batch."""

    number: int | None  # None: as many as the past needed
    per_rollout: int  # groups that are trained
    most: int  # groups that all rounds of a rollout may draw
    _past: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def remember(self, generated: int, informative: int) -> None:
        """Note how many groups a rollout needed, and how many of them had a spread."""
        self._past.append((generated, informative))

    def wanted(self) -> int:
        """Return the number of spare groups of the next rollout; with no past it is 0."""
        if self.number is not None:
            return min(self.number, self.most)
        generated = sum(groups for groups, _ in self._past)
        informative = sum(groups for _, groups in self._past)
        if informative == 0:
            return self.most if generated else 0
        uniform = (generated - informative) / informative  # for each group with a spread
        return min(math.ceil(_MARGIN * uniform * self.per_rollout), self.most)
