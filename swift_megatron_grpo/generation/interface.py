"""The interface of an inference engine, as the loop uses it, wherever the engine runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

from swift_megatron_grpo.settings.config import SamplingConfig
from swift_megatron_grpo.types import DraftCounts, Prompt, Rollout, ScoredText
from swift_megatron_grpo.weights.transport.buckets import NamedWeights
from swift_megatron_grpo.weights.transport.held_weights import WorkerWeights

T = TypeVar("T")
AdapterConfig = dict[str, Any]  # of peft


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a list of requests that this rank's engine answers."""

    index: int
    of: int
    reports: bool  # True on the rank whose results count for the engine
    whole_groups: bool = False  # one engine answers all completions of a prompt

    def pick(self, requests: Sequence[T], group_size: int = 1) -> list[T]:
        """Return a consecutive slice, so that most completions of one prompt share its cached prefix."""
        unit = group_size if self.whole_groups else 1
        begin, end = (len(requests) // unit * i // self.of * unit for i in (self.index, self.index + 1))
        return list(requests[begin:end])


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to generate."""

    index: int  # its place among all requests of this generation
    prompt: Prompt
    seed: int | None  # None: the engine's own generator samples it
    returns_experts: bool = False  # the completion comes with the experts that the engine's routers chose
    place: int = 0  # among the completions of its prompt


@dataclass(frozen=True, slots=True)
class Progress:
    """The results of a generation since the previous call of `Generation.next`."""

    finished: dict[int, Rollout]  # by index of the request, in whole groups
    needs_weights: bool  # an engine has come back and waits for the newest weights


class Generation(Protocol):
    """Requests in progress; the engine may work on them between calls of `next`."""

    @property
    def is_running(self) -> bool:
        """True while this rank's engine is busy with these requests."""

    def next(self, newest: int) -> Progress:
        """Wait for progress; call again until all are finished. `newest`: the version of the trainer's weights."""


@dataclass(frozen=True, slots=True)
class BatchGeneration:
    """A generation that completes all requests in its first call of `next`."""

    complete: Callable[[], dict[int, Rollout]]  # by index of the request
    is_running = False  # the engine is idle outside `next`

    def next(self, newest: int) -> Progress:
        return Progress(self.complete(), needs_weights=False)


@dataclass(frozen=True, slots=True)
class AnsweredRequest:
    """A request from its start to its completion, as the rank that sent it measured it."""

    server: str
    start: float  # seconds since 1970
    seconds: float


class GenerationEngine(Protocol):
    """An inference engine with one or more replicas. Every rank calls every method."""

    @property
    def share(self) -> Share: ...

    @property
    def memory_to_wake(self) -> int:
        """Bytes of this rank's GPU that the engine has yet to allocate; 0 if it is awake or on other GPUs."""

    @property
    def is_new(self) -> bool:
        """True while the engine, or any of its replicas, has not completed a checksummed load."""

    @property
    def held_media(self) -> frozenset[str]:
        """The kinds of media (image, video, audio) for which the engine, or any of its replicas, holds a part."""

    def needs_weights(self, version: int) -> bool:
        """Return True if the engine, or any of its replicas, runs weights of another version."""

    def mark_verified(self) -> None:
        """Allow generation with the last weights sent: they are known to be the trainer's."""

    def invalidate_weights(self) -> None:
        """Discard the last weights sent, which are not the trainer's: the engine needs them again."""

    def generate(self, requests: Sequence[Request], group_size: int, sampling: SamplingConfig) -> Generation:
        """Start one completion per request. Each `group_size` neighbours form a group and are returned together."""

    def wake_weights(self) -> None:
        """Allocate memory for weights; their values are undefined until they are loaded if sleep discarded them."""

    def load_weights(
        self, weights: NamedWeights, version: int, adapter: AdapterConfig | None, collect_checksums: bool
    ) -> None:
        """Load all weights, or a LoRA adapter if `adapter` has its configuration. Checksums are for `held_weights`."""

    @property
    def lacks_base(self) -> bool:
        """True if the engine runs an adapter on weights that it has discarded; the same on all ranks."""

    def load_base(self, weights: NamedWeights) -> None:
        """Load the weights below the adapter. `load_weights` with the adapter must follow."""

    def wake_cache(self) -> None: ...

    def start_scoring(self, text: ScoredText) -> Callable[[], dict[str, list[float]]]:
        """Start to compute log-probs of every token but the first, at temperature 1 and over the whole vocabulary.

        Return a function that waits for them, by the engine names of `held_weights`; engines with other weights are
        left out. Call it after wake_cache: an engine in this process computes them then. An image has as many tokens as
        the engine puts in place of its placeholder.
        """

    def held_weights(self) -> list[WorkerWeights]:
        """Return what each worker that this rank queries holds of the last load, which has collected checksums."""

    def sleep(self) -> None: ...

    def answered_requests(self) -> list[AnsweredRequest]:
        """Return the newest requests that servers have answered since the last call; none without servers."""

    def take_draft_counts(self) -> DraftCounts:
        """Return what drafts did since the last call, of engines that report to this rank; none without drafts."""

    def shutdown(self) -> None: ...


def _first_seed(*parts: object) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=6).digest(), "big")


def requests_for(
    prompts: Sequence[Prompt], per_prompt: int, seed: int | None, version: int | None, with_experts: int = 0
) -> list[Request]:
    """Create `per_prompt` requests for every prompt; the first `with_experts` return the experts that routers chose.

    A seed depends on the weights' version, the prompt and the place in its group: what else is generated, and in which
    round of --dynamic_sample, changes no completion. Evaluations have no version, so that those at two steps differ by
    the weights alone, and seeds of their own, so that an engine's random numbers stay as they are for training.
    """
    of_all = (seed,) if version is None else (seed, version)
    firsts = [_first_seed(*of_all, prompt.prompt_id) for prompt in prompts]
    return [
        Request(
            index,
            prompts[index // per_prompt],
            None if seed is None else firsts[index // per_prompt] + index % per_prompt,
            index < with_experts,
            index % per_prompt,
        )
        for index in range(len(prompts) * per_prompt)
    ]
