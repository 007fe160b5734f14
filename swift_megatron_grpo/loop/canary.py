"""The fixed text whose log-probs the trainer and every engine compute after a weight sync."""

from __future__ import annotations

from collections.abc import Sequence

from swift_megatron_grpo.parallel import Coordinator
from swift_megatron_grpo.training.passes import Passes
from swift_megatron_grpo.types import Sample

# Prose, numbers and code, as most models have seen them. The cost of an engine's response grows with the length.
CANARY_TEXT = (
    "The quick brown fox jumps over the lazy dog. In 1969 two people walked on the Moon; 12 have been there since. "
    "If 3x + 5 = 20, then x = 5, because 3 * 5 = 15 and 15 + 5 = 20. def add(a, b): return a + b\n"
    "Water boils at 100 degrees Celsius at sea level, and freezes at 0. Paris is the capital of France. "
)


class Canary:
    """The trainer's log-probs of the fixed text. Every rank calls `logprobs`."""

    def __init__(self, tokens: Sequence[int], passes: Passes, coordinator: Coordinator) -> None:
        self.tokens = list(tokens)
        self.passes = passes  # at temperature 1
        self._coordinator = coordinator

    def logprobs(self) -> list[list[float]]:
        """Return the log-probs of every data-parallel rank, whose copies of the weights must not diverge either."""
        mask = [False] + [True] * (len(self.tokens) - 1)
        sample = Sample(tokens=self.tokens, completion_mask=mask, advantage=0.0)
        values = self.passes.infer([sample] * self.passes.fewest_samples)
        gathered = self._coordinator.gather_samples(values, self.passes.parallel)
        return [copy.logprobs for copy in gathered.values()]
