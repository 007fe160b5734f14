"""rollout/router_agreement: the share of choices in which the trainer's routers and vLLM's chose the same experts.

A choice is made for one token in one layer: k experts, in any order. Nothing is replayed in the pass that measures it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from swift_megatron_grpo.loop.samples import without_routing
from swift_megatron_grpo.runtime.parallel import Coordinator
from swift_megatron_grpo.training.passes import Passes
from swift_megatron_grpo.types import ExpertRows, Sample


class RouterAgreement:
    """Compares some completions of every rollout. Every rank calls `measure`."""

    def __init__(self, passes: Passes, coordinator: Coordinator, completions: int) -> None:
        self._passes = passes
        self._coordinator = coordinator
        self._completions = completions

    def measure(self, samples: Sequence[Sample], engine: Sequence[ExpertRows | None]) -> float | None:
        """Return the share of equal choices; None: the engine has reported none. `engine`: rows of each sample."""
        fewest = self._passes.fewest_samples
        wanted = -(-self._completions // fewest) * fewest
        some = without_routing(samples[: min(wanted, len(samples) // fewest * fewest)])
        _, trainer = self._passes.infer_and_record(some)
        position = self._passes.parallel
        same = total = 0
        if position.tp_rank == 0 and position.cp_rank == 0:  # one of the ranks that hold copies
            for index, rows in trainer.items():
                reported = engine[index]
                if reported is not None:
                    equal = equal_choices(rows, reported, some[index].completion_mask)
                    same = same + int(equal.sum())
                    total = total + equal.size
        gathered = self._coordinator.all_gather((same, total))
        same, total = (sum(values) for values in zip(*gathered, strict=True))
        return same / total if total else None


def equal_choices(trainer: ExpertRows, engine: ExpertRows, sampled: Sequence[bool]) -> NDArray[np.bool_]:
    """Return True for each equal choice, [sampled tokens with a row, layers with experts on this rank].

    `trainer`: [t, layers, k], -1 in layers of other ranks. `engine`: [t - 1, layers, k] or fewer rows.
    """
    layers = np.flatnonzero(trainer[0, :, 0] >= 0)
    rows = np.flatnonzero(np.asarray(sampled[: len(engine)]))
    ours, theirs = (np.sort(choices[rows][:, layers].astype(np.int32)) for choices in (trainer, engine))
    equal: NDArray[np.bool_] = (ours == theirs).all(-1)
    return equal
