"""The order in which rollouts start and are trained, and the weights that generate them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.data.prompts import PromptSource
from swift_megatron_grpo.generation.interface import Request
from swift_megatron_grpo.loop.rollouts import Rollouts
from swift_megatron_grpo.loop.run_ahead import RunAhead
from swift_megatron_grpo.loop.step_context import PhaseTimer, StepContext
from swift_megatron_grpo.loop.training_batches import old_logprobs_from_engine
from swift_megatron_grpo.settings.config import SamplingConfig
from swift_megatron_grpo.settings.losses import Correction
from swift_megatron_grpo.types import Prompt, Rollout
from tests.fakes.generation import Engine, Generation
from tests.fakes.runs import EVALUATION, GROUP, PROMPTS, fake_run, routing_of

STEPS = 2  # optimizer steps of a rollout


def make(
    max_staleness: int,
    rollouts: int,
    first: int = 0,
    max_resample: int = 0,
    folder: Path | None = None,
    in_flight: bool = False,
) -> tuple[Rollouts, Engine]:
    """Create the rollouts of a run; with a `folder` it dumps them, and continues what is in it."""
    run = fake_run(
        max_staleness=max_staleness,
        max_resample=max_resample,
        dump=folder,
        routing=routing_of(compared=3),
        in_flight=in_flight,
    )
    ahead = RunAhead(max_staleness, STEPS, first, first * STEPS, rollouts * STEPS)
    return Rollouts(run.config, run.stages, None, ahead), run.engine


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


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3])
def test_in_flight_every_prompt_is_trained_in_order_within_the_bound(max_staleness: int) -> None:
    """Each completion begins with the weights of its start, and the newest ones generate two thirds of it."""
    rollouts, engine = make(max_staleness, rollouts=7, in_flight=True)
    for number in range(7):
        now = step(number)
        graded = rollouts.take(now)
        assert ids(graded) == expected(number, number + 1)[0]
        used = {version for completion in graded for version, _ in completion.rollout.spans_of_weights}
        oldest = max(0, number - max_staleness)
        assert used == {version * STEPS for version in {oldest, number}}
        if max_staleness:
            assert now.metrics["rollout/staleness_max"] == number - oldest
            assert now.metrics["rollout/staleness"] == (number - oldest) / 3
            assert now.metrics["rollout/several_weights"] == (0 if oldest == number else len(graded))
    assert sorted(set(engine.synced)) == [number * STEPS for number in range(7)]
    assert not any(generation.is_running for generation in engine.generations)


def test_in_flight_replacements_start_with_the_newest_weights() -> None:
    """All groups are uniform here. The replacements start before the rollout that the bound permits next."""
    rollouts, engine = make(2, rollouts=5, max_resample=1, in_flight=True)
    for number, started in enumerate([4, 2, 2, 1, 1]):
        before = len(engine.generations)
        now = step(number)
        rollouts.take(now)
        assert [generation.version for generation in engine.generations[before:]] == [number * STEPS] * started
        assert now.metrics["rollout/staleness_max"] <= 2


def test_spans_are_dumped_and_read_again(tmp_path: Path) -> None:
    before, _ = make(1, rollouts=4, folder=tmp_path, in_flight=True)
    trained = [list(before.take(step(number))) for number in range(3)]
    assert trained[2][0].rollout.spans == [(2, 1), (4, 2)]
    again, engine = make(1, rollouts=4, first=1, folder=tmp_path, in_flight=True)
    assert [list(again.take(step(number))) for number in (1, 2)] == trained[1:]
    assert len(engine.requested) == 1  # rollout 3, while rollout 2 is trained


def test_weights_that_were_never_sent_stop_the_run_also_in_flight() -> None:
    rollouts, engine = make(1, rollouts=3, in_flight=True)
    rollouts.take(step(0))
    rollouts.take(step(1))
    engine.generations[-1].version = 1
    with pytest.raises(RuntimeError, match=r"completions of weights \[1\] were returned instead of 2 or 4"):
        rollouts.take(step(2))


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
    trained = [list(before.take(step(number))) for number in range(2)]
    engine.killed_after = 1
    with suppress(KeyboardInterrupt):
        before.take(step(2))

    again, engine = make(0, rollouts=4, first=1, folder=tmp_path)
    assert list(again.take(step(1))) == trained[1] and engine.synced == [] and engine.requested == []
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
    trained = [list(before.take(step(number))) for number in range(3)]
    again, engine = make(1, rollouts=4, first=1, folder=tmp_path)
    assert [list(again.take(step(number))) for number in (1, 2)] == trained[1:]
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
    plain, corrected = Correction(), Correction(rollout_importance_sampling_mode="token_truncate")
    assert not old_logprobs_from_engine([new, new], 4, plain)
    assert old_logprobs_from_engine([rollout(4, [-1.0]), old], 4, plain)
    assert not old_logprobs_from_engine([old], 4, corrected)
    engine = Correction(old_logprobs="engine")
    assert old_logprobs_from_engine([rollout(4, [-1.0])], 4, engine) and old_logprobs_from_engine([old], 4, engine)
    with pytest.raises(RuntimeError, match="use --old_logprobs policy or, with --rollout_replay, a folder with"):
        old_logprobs_from_engine([new, rollout(4, [-1.0])], 4, engine)
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
