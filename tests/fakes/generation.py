"""An engine that generates one group per call of `next`, and is busy until all are generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from swift_megatron_grpo.generation.interface import Progress, Request, Share
from swift_megatron_grpo.loop.step_context import PhaseTimer
from swift_megatron_grpo.settings.config import SamplingConfig
from swift_megatron_grpo.types import Rollout, TokenSequence

LOGPROB = -1.0  # of each sampled token, under the engine's weights


@dataclass
class Engine:
    """Stands in for servers and for WeightSync."""

    share = Share(0, 1, True)
    version: int = -1
    lost: bool = False  # no server has its weights any more
    synced: list[int] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    requested: list[list[Request]] = field(default_factory=list)
    with_logprobs: list[bool] = field(default_factory=list)
    killed_after: int = -1  # groups
    events: list[str] = field(default_factory=list)
    rounding: float | None = None  # of the weight sync
    earlier: int = 0  # sequences of the first completion of every group, before its last one
    in_flight: bool = False  # weights arrive while it generates

    def generate(self, requests: Sequence[Request], group_size: int, sampling: SamplingConfig) -> Generation:
        self.events.append("generate")
        self.requested.append(list(requests))
        self.with_logprobs.append(sampling.logprobs)
        self.generations.append(Generation(self, list(requests), group_size, self.version))
        return self.generations[-1]

    def to_engine(self, version: int, timer: PhaseTimer) -> dict[str, float]:
        running = any(generation.is_running for generation in self.generations)
        assert self.in_flight or not running, "new weights while it generates"
        self.events.append(f"sync {version}")
        self.version = version
        self.synced.append(version)
        return {}

    def resend(self, version: int, timer: PhaseTimer) -> None:
        self.version, self.lost = version, False
        self.synced.append(version)

    def sleep(self) -> None:
        self.events.append("engine sleeps")

    def shutdown(self) -> None:
        self.events.append("engine ends")


@dataclass
class Generation:
    engine: Engine
    requests: list[Request]
    group_size: int
    version: int  # of the weights that it started with

    @property
    def is_running(self) -> bool:
        return bool(self.requests)

    def next(self, newest: int) -> Progress:
        """Generate one group."""
        if self.engine.killed_after == 0:
            raise KeyboardInterrupt
        self.engine.killed_after -= 1
        if self.engine.lost:
            return Progress({}, needs_weights=True)
        group, self.requests = self.requests[: self.group_size], self.requests[self.group_size :]
        return Progress({request.index: self._complete(request) for request in group}, needs_weights=False)

    def _complete(self, request: Request) -> Rollout:
        token = 2 if request.seed is None else request.seed % 97
        prompt, newest = request.prompt, self.engine.version
        if self.engine.in_flight and newest != self.version:
            spans = [(self.version, 1), (newest, 2)]
            return Rollout(prompt, [1], [token] * 3, [LOGPROB] * 3, prompt.prompt_id, "stop", self.version, spans=spans)
        earlier = self.engine.earlier if request.place == 0 else 0
        others = tuple(TokenSequence([1, 9], [number], [LOGPROB]) for number in range(earlier))
        return Rollout(prompt, [1], [token], [LOGPROB], prompt.prompt_id, "stop", newest, earlier=others)
