"""The fixed text whose log-probs the trainer and every engine compute after a weight sync."""

from __future__ import annotations

from collections.abc import Sequence

from swift_megatron_grpo.parallel import Coordinator
from swift_megatron_grpo.training.passes import Passes
from swift_megatron_grpo.types import Sample

# Prose, numbers and code: what most models have seen. Its length is what an engine's answer costs.
CANARY_TEXT = (
    "The quick brown fox jumps over the lazy dog. In 1969 two people walked on the Moon; 12 have been there since. "
    "If 3x + 5 = 20, then x = 5, because 3 * 5 = 15 and 15 + 5 = 20. def add(a, b): return a + b\n"
    "Water boils at 100 degrees Celsius at sea level, and freezes at 0. Paris is the capital of France. "
)
CANARY_TOKENS = 128


class Canary:
    """What the trainer says of a fixed text. All ranks together."""

    def __init__(self, tokens: Sequence[int], passes: Passes, coordinator: Coordinator) -> None:
        self.tokens = list(tokens)
        self.passes = passes  # at temperature 1
        self._coordinator = coordinator

    def logprobs(self) -> list[list[float]]:
        """On every rank, from every data-parallel rank: copies of the weights must not have parted either."""
        mask = [False] + [True] * (len(self.tokens) - 1)
        sample = Sample(tokens=self.tokens, completion_mask=mask, advantage=0.0)
        values = self.passes.infer([sample] * self.passes.fewest_samples)
        told = self._coordinator.gather_samples(values, self.passes.parallel)
        return [each.logprobs for each in told.values()]
