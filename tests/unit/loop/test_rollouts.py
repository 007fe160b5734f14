"""The order in which rollouts start and are trained, and the weights that generate them.

One rank, with a fake engine that generates one group per call of `next` and is busy until all are generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from swift_megatron_grpo.data.prompts import PromptSource
from swift_megatron_grpo.generation.interface import Progress, Request, Share
from swift_megatron_grpo.grading import RewardFunctions
from swift_megatron_grpo.loop.rollouts import Rollouts
from swift_megatron_grpo.loop.run_ahead import RunAhead
from swift_megatron_grpo.loop.step import old_logprobs_from_engine
from swift_megatron_grpo.loop.step_context import PhaseTimer, StepContext
from swift_megatron_grpo.output.recording.dump import RolloutDump
from swift_megatron_grpo.output.recording.earlier import EarlierRollouts
from swift_megatron_grpo.output.recording.folder import Settings
from swift_megatron_grpo.output.recording.values import Limits
from swift_megatron_grpo.packing.routing import ExpertLayers
from swift_megatron_grpo.runtime.stopping.request import StopRequest
from swift_megatron_grpo.settings.config import (
    EvaluationConfig,
    GradingConfig,
    RecordingConfig,
    SamplingConfig,
)
from swift_megatron_grpo.settings.losses import NO_CORRECTION
from swift_megatron_grpo.settings.routing import Routing
from swift_megatron_grpo.types import Prompt, Rollout

T = TypeVar("T")
GROUP, PROMPTS, STEPS = 2, 3, 2  # completions of a prompt, prompts and optimizer steps of a rollout
EVALUATION = EvaluationConfig(
    SamplingConfig(0.6, 0.9, -1, 1.0, 8, (), seed=5), num_generations=4, prompts_at_once=2, most_prompts=None,
    before_training=False, correct_reward=0, correct_from=1.0, names={},
)  # fmt: skip
DUMPED = Settings(GROUP, GROUP * PROMPTS, 1.0, ("length",))


class OneRank:
    """The Coordinator of a single rank."""

    rank, world_size = 0, 1

    def all_gather(self, value: T) -> list[T]:
        return [value]

    def all_gather_or_raise(self, work: Callable[[], T], what: str) -> list[T]:
        return [work()]


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

    def generate(self, requests: Sequence[Request], group_size: int, sampling: SamplingConfig) -> Generation:
        self.requested.append(list(requests))
        self.with_logprobs.append(sampling.logprobs)
        self.generations.append(Generation(self, list(requests), group_size))
        return self.generations[-1]

    def to_engine(self, version: int, timer: PhaseTimer) -> dict[str, float]:
        assert not any(generation.is_running for generation in self.generations), "new weights while it generates"
        self.version = version
        self.synced.append(version)
        return {}

    def resend(self, version: int, timer: PhaseTimer) -> None:
        self.version, self.lost = version, False
        self.synced.append(version)

    def sleep(self) -> None: ...


@dataclass
class Generation:
    engine: Engine
    requests: list[Request]
    group_size: int

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
        return Progress({request.index: self._complete(request.prompt) for request in group}, needs_weights=False)

    def _complete(self, prompt: Prompt) -> Rollout:
        return Rollout(prompt, [1], [2], [-1.0], prompt.prompt_id, "stop", self.engine.version)


ROUTING = Routing(
    router_replay_mode="disabled", router_agreement_samples=3, moe_router_load_balancing_type=None, model=None
)


def make(
    max_staleness: int, rollouts: int, first: int = 0, max_resample: int = 0, folder: Path | None = None
) -> tuple[Rollouts, Engine]:
    """Create the rollouts of a run; with a `folder` it dumps them, and continues what is in it."""
    rows = [{"messages": [{"role": "user", "content": str(i)}]} for i in range(8)]
    reward = RewardFunctions(["length"], [lambda completions, **_: [float(len(text)) for text in completions]], [1.0])
    engine = Engine()
    grading = GradingConfig(GROUP, ("length",), (1.0,), "group", "stop", max_resample_times=max_resample)
    config = SimpleNamespace(
        batch=SimpleNamespace(rollout_prompts=PROMPTS), grading=grading, deadlines=SimpleNamespace(reward_timeout=None),
        sampling=SamplingConfig(1.0, 1.0, -1, 1.0, 4, ()), routing=ROUTING,
        recording=RecordingConfig(dump=folder, continues=True), loss=SimpleNamespace(correction=NO_CORRECTION),
        max_staleness=max_staleness, logprobs_interval=2,
    )  # fmt: skip
    stages = SimpleNamespace(
        prompts=PromptSource(rows, seed=1, shuffle=True), spare_prompts=PromptSource(rows, 2, True, label="spare-"),
        generation=engine, sync=engine, rewards=reward, coordinator=OneRank(), replay=None,
        dump=folder and RolloutDump(folder, DUMPED, 0, writes_here=True, keeps_later=True),
        earlier=folder and EarlierRollouts(folder, Limits(99, 1)),
        watchdog=SimpleNamespace(limit=lambda *_: nullcontext()), stop=StopRequest(OneRank(), grace=120.0),  # type: ignore[arg-type]
        residency=SimpleNamespace(for_inference=lambda: None),
        training=SimpleNamespace(passes=SimpleNamespace(expert_layers=ExpertLayers(1, (0,), 4, 2))),
    )  # fmt: skip
    ahead = RunAhead(max_staleness, STEPS, first, first * STEPS, rollouts * STEPS)
    return Rollouts(config, stages, None, ahead), engine  # type: ignore[arg-type]


def step(rollout: int) -> StepContext:
    return StepContext(rollout * STEPS, PhaseTimer())


def ids(graded: Sequence[Any]) -> list[str]:
    return [completion.rollout.prompt.prompt_id for completion in graded]


def versions(graded: Sequence[Any]) -> set[int]:
    return {completion.rollout.weights_version for completion in graded}


def expected(first: int, last: int) -> list[list[str]]:
    source = PromptSource([{"messages": [{"role": "user"}]}] * 8, seed=1, shuffle=True, taken=first * PROMPTS)
    taken = [source.take(PROMPTS) for _ in range(first, last)]
    return [[prompt.prompt_id for prompt in prompts for _ in range(GROUP)] for prompts in taken]


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_every_prompt_is_trained_once_and_nothing_else_is_generated(max_staleness: int) -> None:
    rollouts, engine = make(max_staleness, rollouts=5)
    trained, started = [], []
    for number in range(5):
        now = step(number)
        graded = rollouts.take(now)
        trained.append(ids(graded))
        started.append(len(engine.generations))
        if max_staleness:
            assert now.metrics["rollout/staleness_max"] <= max_staleness
    assert trained == expected(0, 5)
    assert started == {0: [1, 2, 3, 4, 5], 1: [2, 3, 4, 5, 5], 2: [3, 3, 5, 5, 5]}[max_staleness]
    assert not any(generation.is_running for generation in engine.generations)
    assert set(engine.synced) == set({0: [0, 2, 4, 6, 8], 1: [0, 2, 4, 6], 2: [0, 4]}[max_staleness])


def test_a_resumed_run_starts_rollouts_again_that_were_started_ahead() -> None:
    before, _ = make(1, rollouts=6)
    trained = [ids(before.take(step(number))) for number in range(3)]  # rollout 3 is pending; a checkpoint; killed
    resumed, engine = make(1, rollouts=6, first=3)
    trained += [ids(resumed.take(step(number))) for number in range(3, 6)]
    assert trained == expected(0, 6)
    assert engine.synced[0] == 6


def indices(engine: Engine) -> list[list[int]]:
    return [[request.index for request in requests] for requests in engine.requested]


def test_a_killed_run_continues_its_dump_and_generates_only_the_rest(tmp_path: Path) -> None:
    """Killed in rollout 2, of which one group has finished; the checkpoint is that before rollout 1."""
    before, engine = make(0, rollouts=4, folder=tmp_path)
    trained = [before.take(step(number)) for number in range(2)]
    engine.killed_after = 1
    with suppress(KeyboardInterrupt):
        before.take(step(2))

    again, engine = make(0, rollouts=4, first=1, folder=tmp_path)
    assert again.take(step(1)) == trained[1] and engine.synced == [] and engine.requested == []
    third = again.take(step(2))
    assert ids(third) == expected(2, 3)[0] and versions(third) == {4}
    assert engine.synced == [4] and indices(engine) == [[2, 3, 4, 5]]
    assert ids(again.take(step(3))) == expected(3, 4)[0] and indices(engine)[1] == [0, 1, 2, 3, 4, 5]
    assert sorted(path.name for path in tmp_path.glob("rollout-*")) == [f"rollout-00000{i}.jsonl" for i in range(4)]


def test_dumped_completions_of_other_weights_are_generated_again(tmp_path: Path) -> None:
    before, _ = make(0, rollouts=4, folder=tmp_path)
    before.take(step(0))
    before.take(step(1))
    again, engine = make(0, rollouts=4, folder=tmp_path)
    assert versions(again.take(StepContext(1, PhaseTimer()))) == {1} and len(engine.requested) == 1
    again.take(step(1))
    assert len(engine.requested) == 2  # it was generated by weights that were trained on other completions


def test_dumped_rollouts_of_a_run_ahead_of_training_are_not_started_again(tmp_path: Path) -> None:
    before, _ = make(1, rollouts=4, folder=tmp_path)
    trained = [before.take(step(number)) for number in range(3)]
    again, engine = make(1, rollouts=4, first=1, folder=tmp_path)
    assert [again.take(step(number)) for number in (1, 2)] == trained[1:]
    assert len(engine.requested) == 1  # rollout 3, while rollout 2 is trained
    assert ids(again.take(step(3))) == expected(3, 4)[0]


def test_an_evaluation_uses_the_newest_weights_and_keeps_pending_rollouts() -> None:
    rollouts, engine = make(1, rollouts=3)
    rollouts.take(step(0))
    assert engine.generations[-1].is_running
    prompts = [Prompt("validation", {"messages": [{"role": "user", "content": "?"}]})]
    graded = rollouts.evaluate(
        prompts, EVALUATION, StepContext(1, PhaseTimer())
    )  # in the middle of the first rollout's steps
    assert ids(graded) == ["validation"] * 4 and versions(graded) == {1}
    kept = rollouts.take(step(1))
    assert ids(kept) == expected(1, 2)[0] and versions(kept) == {0}


def test_uniform_groups_are_replaced_before_the_next_rollout_starts() -> None:
    """Every group is uniform here, because all completions are equal."""
    rollouts, engine = make(1, rollouts=3, max_resample=1)
    rollouts.take(step(0))
    graded = rollouts.take(step(1))
    assert len(graded) == PROMPTS * GROUP
    assert len(engine.generations) == 5  # 0, its draw, 1, its draw, 2
    assert engine.synced[-1] == 2 and engine.generations[-1].is_running


def test_weights_that_no_server_has_any_more_are_replaced_by_the_trainers() -> None:
    rollouts, engine = make(1, rollouts=3)
    rollouts.take(step(0))
    engine.lost = True
    now = step(1)
    graded = rollouts.take(now)
    assert versions(graded) == {2} and now.metrics["rollout/staleness_max"] == 0


def test_completions_of_unexpected_weights_stop_the_run() -> None:
    rollouts, engine = make(1, rollouts=3)
    rollouts.take(step(0))
    engine.version = 1
    with pytest.raises(RuntimeError, match=r"completions of weights \[1\] were returned instead of 0"):
        rollouts.take(step(1))


def test_old_log_probs_are_the_engines_for_old_weights_without_correction() -> None:
    def rollout(version: int, logprobs: list[float] | None) -> Rollout:
        return Rollout(Prompt("p", {}), [1], [2], logprobs, "", "stop", version)

    new, old, without_logprobs = rollout(4, None), rollout(2, [-1.0]), rollout(2, None)
    plain, corrected = NO_CORRECTION, replace(NO_CORRECTION, rollout_importance_sampling_mode="token_truncate")
    assert not old_logprobs_from_engine([new, new], 4, plain)
    assert old_logprobs_from_engine([rollout(4, [-1.0]), old], 4, plain)
    assert not old_logprobs_from_engine([old], 4, corrected)
    for correction in (plain, corrected):
        with pytest.raises(RuntimeError, match="came without the engine's log-probs"):
            old_logprobs_from_engine([without_logprobs], 4, correction)


def test_experts_are_requested_of_first_completions_but_not_in_evaluation() -> None:
    rollouts, engine = make(0, 1)
    requested: list[list[bool]] = []
    sampled: list[SamplingConfig] = []
    generate = engine.generate

    def remember(requests: Sequence[Request], group_size: int, sampling: SamplingConfig) -> Generation:
        requested.append([request.returns_experts for request in requests])
        sampled.append(sampling)
        return generate(requests, group_size, sampling)

    engine.generate = remember  # type: ignore[method-assign]
    rollouts.take(step(0))
    rollouts.evaluate([Prompt("e", {"messages": [{"role": "user", "content": "e"}]})], EVALUATION, step(0))
    first, evaluation = requested
    assert sum(first) == 3 and first[:3] == [True] * 3 and not any(evaluation) and len(evaluation) == 4
    assert sampled == [SamplingConfig(1.0, 1.0, -1, 1.0, 4, ()), EVALUATION.sampling]


def test_log_probs_are_requested_only_where_something_reads_them() -> None:
    rollouts, engine = make(0, rollouts=5)
    for number in range(5):
        rollouts.take(step(number))
    assert engine.with_logprobs == [True, False, True, False, True]  # every second one

    asynchronous, engine = make(1, rollouts=5)
    for number in range(5):
        asynchronous.take(step(number))
    assert engine.with_logprobs == [True] * 5


def test_the_first_rollout_that_a_resumed_run_generates_has_log_probs() -> None:
    rollouts, engine = make(0, rollouts=6, first=2)
    rollouts.skip()  # the checkpoint has rollout 2
    for number in range(3, 6):
        rollouts.take(step(number))
    assert engine.with_logprobs == [True, True, False]
