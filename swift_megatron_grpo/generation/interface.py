"""What the loop asks of an inference engine, wherever it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

import torch

from swift_megatron_grpo.config import SamplingConfig
from swift_megatron_grpo.protocol.held_weights import WorkerWeights
from swift_megatron_grpo.types import Prompt, Rollout

T = TypeVar("T")
AdapterConfig = dict[str, Any]  # of peft
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


@dataclass(frozen=True, slots=True)
class Request:
    """One completion that is wanted."""

    index: int  # its place among all requests of this generation
    prompt: Prompt
    seed: int | None  # None: the engine's own generator samples it


@dataclass(frozen=True, slots=True)
class News:
    """What a generation has to tell since it was asked last."""

    finished: dict[int, Rollout]  # by index of the request, in whole units
    needs_weights: bool  # an engine has come back and waits for the newest ones


class Generation(Protocol):
    """Requests that are being answered, by an engine that may go on while nobody asks for news."""

    @property
    def runs(self) -> bool:
        """Whether this rank's engine is busy with it now."""
        ...

    def next(self, newest: int) -> News:
        """Waits for news. Called again until all requests are finished. `newest`: the version of the trainer's
        weights, which may be newer than those that it began with."""
        ...


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Of an engine that answers all requests together: it does so when asked for news."""

    answer: Callable[[], dict[int, Rollout]]  # by index of the request
    runs = False  # not while the trainer does something else

    def next(self, newest: int) -> News:
        return News(self.answer(), needs_weights=False)


class GenerationEngine(Protocol):
    @property
    def share(self) -> Share: ...

    @property
    def memory_to_wake(self) -> int:
        """Bytes of this rank's GPU that it will take when it wakes up; 0 if it is awake, or on other GPUs."""
        ...

    @property
    def is_new(self) -> bool:
        """Whether it, or a part of it, has completed no checksummed load yet."""
        ...

    def needs_weights(self, version: int) -> bool:
        """Whether it, or a part of it, runs other weights than these."""
        ...

    def mark_verified(self) -> None:
        """The weights it was sent are the trainer's: it may generate with them."""
        ...

    def invalidate_weights(self) -> None:
        """The weights it was sent last are not the trainer's: it needs them again."""
        ...

    def generate(self, requests: Sequence[Request], unit: int, sampling: SamplingConfig) -> Generation:
        """One completion for each request. Completions are told `unit` neighbours at a time, which is a group."""
        ...

    def wake_weights(self) -> None:
        """Room for weights; what they hold is not defined until they are loaded, if they were discarded."""
        ...

    def load_weights(
        self, weights: NamedWeights, version: int, adapter: AdapterConfig | None, collect_checksums: bool
    ) -> None:
        """All weights; or, with its configuration, those of a LoRA adapter on the checkpoint that the engine has.
        `collect_checksums`: held_weights() will be asked what became of each."""
        ...

    def wake_cache(self) -> None: ...

    def score_text(self, tokens: Sequence[int]) -> dict[str, list[float]]:
        """Log-probs of every token but the first, at temperature 1 and of all tokens that there are, by each engine
        that this rank asks; by name, as in held_weights. Nothing of other weights answers. After wake_cache."""
        ...

    def held_weights(self) -> list[WorkerWeights]:
        """What the model of each worker that this rank asks holds of the weights it was last sent. It can tell once it
        has loaded weights with checksums."""
        ...

    def sleep(self) -> None: ...

    def shutdown(self) -> None: ...


def requests_for(prompts: Sequence[Prompt], each: int, seed: int | None, version: int) -> list[Request]:
    """`each` completions of every prompt. Seeds are consecutive, and others with every version of the weights."""
    places = [prompt for prompt in prompts for _ in range(each)]
    if seed is None:
        return [Request(index, prompt, None) for index, prompt in enumerate(places)]
    first = _first_seed(seed, version, prompts[0].prompt_id)
    return [Request(index, prompt, first + index) for index, prompt in enumerate(places)]


def _first_seed(*parts: object) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=6).digest(), "big")
