"""What the loop asks of an inference engine, wherever it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from swift_megatron_grpo.config import SamplingConfig
from swift_megatron_grpo.holdings import Holding
from swift_megatron_grpo.types import Prompt, Rollout

T = TypeVar("T")
NamedWeights = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Share:
    """Which of a list of requests this rank's engine answers, and whether this rank speaks for the engine."""

    index: int
    of: int
    speaks: bool

    def pick(self, requests: Sequence[T]) -> list[T]:
        """Consecutive, as even as it goes: completions of one prompt stay together and share its prefix."""
        begin, end = (len(requests) * i // self.of for i in (self.index, self.index + 1))
        return list(requests[begin:end])


class GenerationEngine(Protocol):
    weights_version: int  # of the weights it runs; -1: none that the trainer has sent

    @property
    def share(self) -> Share: ...

    @property
    def memory_to_wake(self) -> int:
        """Bytes of this rank's GPU that it will take when it wakes up; 0 if it is awake, or on other GPUs."""
        ...

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Rollout]:
        """One completion for each entry, in order. Repeat a prompt to sample it several times."""
        ...

    def wake_weights(self) -> None:
        """Room for weights; what they hold is not defined until they are loaded, if they were discarded."""
        ...

    def load_weights(self, weights: NamedWeights, version: int, accounted: bool = False) -> None:
        """`accounted`: holdings() will be asked what became of each."""
        ...

    def wake_cache(self) -> None: ...

    def score(self, tokens: Sequence[int]) -> dict[str, list[float]]:
        """Log-probs of every token but the first, at temperature 1 and of all tokens that there are, by each engine
        that this rank asks; by name, as in holdings. Nothing of other weights answers. After wake_cache."""
        ...

    def holdings(self) -> list[Holding]:
        """What the model of each worker that this rank asks holds of the weights it was last sent. It can tell once it
        has loaded weights that were accounted for."""
        ...

    def sleep(self) -> None: ...

    def shutdown(self) -> None: ...
