"""Spare groups change the time of --dynamic_sample only: the batch is that of draws one after the other."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swift_megatron_grpo.data.prompts import PromptSource
from swift_megatron_grpo.generation.requests import conversation_request
from swift_megatron_grpo.grading.rewards import RewardFunctions
from swift_megatron_grpo.loop.rollouts import Rollouts
from swift_megatron_grpo.loop.run_ahead import RunAhead
from swift_megatron_grpo.loop.spare_groups import SpareGroups
from swift_megatron_grpo.loop.step_context import PhaseTimer, StepContext
from swift_megatron_grpo.types import Graded
from tests.fakes.generation import Engine
from tests.fakes.runs import GROUP, ROWS, fake_run
from tests.support.choice import rest_nightly

MOST = 2  # rounds


class Run:
    """Rollouts whose groups have equal rewards with a probability, by the id of the prompt."""

    def __init__(
        self,
        spare_groups: int | None,
        uniform: float = 0.5,
        prompts: int = 3,
        most: int = MOST,
        max_staleness: int = 0,
        folder: Path | None = None,
        first: int = 0,
        bad: str = "",
    ) -> None:
        run = fake_run(max_staleness=max_staleness, max_resample=most, dump=folder, spare_groups=spare_groups)
        config: Any = run.config
        config.sampling, config.batch.rollout_prompts = replace(run.config.sampling, seed=5), prompts
        self.graded: list[str] = []  # prompts of the calls of the reward function

        def spread(completions: list[str], **columns: Any) -> list[float]:
            self.graded += completions[::GROUP]
            rewards = [
                float(i % GROUP * (random.Random(text).random() >= uniform)) for i, text in enumerate(completions)
            ]
            return [float("nan") if text == bad else reward for text, reward in zip(completions, rewards, strict=True)]

        stages = replace(run.stages, rewards=RewardFunctions(["length"], [spread]))
        ahead = RunAhead(max_staleness, 1, first, first, 9)
        self.rollouts, self.engine = Rollouts(config, stages, None, ahead), run.engine
        self.metrics: dict[str, float] = {}

    def take(self, number: int) -> list[Graded]:
        step = StepContext(number, PhaseTimer())
        taken = self.rollouts.take(step)
        self.metrics = {name: value for name, value in step.metrics.items() if name.startswith("dynamic_sample/")}
        return taken


def counts(run: Run) -> tuple[float, float]:
    return run.metrics["dynamic_sample/spare_groups"], run.metrics["dynamic_sample/dropped_groups"]


@pytest.mark.parametrize("runs", rest_nightly([500, 2_500], [500]))  # of four batches
def test_batches_are_those_of_draws_one_after_the_other(runs: int) -> None:
    saved = 0
    for case in range(runs):
        rng = random.Random(case)
        settings: dict[str, Any] = dict(
            uniform=rng.random() * 0.95, prompts=rng.randint(1, 5), most=rng.randint(1, 3), first=rng.randint(0, 3)
        )
        alone = Run(0, **settings)
        together = Run(rng.choice([None, 1, rng.randint(2, 20)]), **settings)
        for number in range(settings["first"], settings["first"] + 4):
            assert list(together.take(number)) == list(alone.take(number))
            differing = {name for name, value in together.metrics.items() if alone.metrics[name] != value}
            assert differing <= {"dynamic_sample/spare_groups", "dynamic_sample/dropped_groups"}
        saved += len(alone.engine.requested) - len(together.engine.requested)
    assert saved > 2 * runs  # rounds


def seeds(engine: Engine) -> dict[tuple[str, int], int | None]:
    """Return the seed of every request by its prompt and its place in the group."""
    requests = [request for requests in engine.requested for request in requests]
    return {(request.prompt.prompt_id, request.index % GROUP): request.seed for request in requests}


def uuids(engine: Engine) -> set[str]:
    return {conversation_request(request).uuid for requests in engine.requested for request in requests}


def test_a_conversation_has_its_name_whatever_is_generated_with_it() -> None:
    """Environments may seed their random numbers with it."""
    alone, together = Run(0, uniform=1.0), Run(4, uniform=1.0)
    alone.take(0), together.take(0)
    assert uuids(alone.engine) == uuids(together.engine) and len(uuids(alone.engine)) == 9 * GROUP


def test_a_completion_has_its_seed_whatever_is_generated_with_it() -> None:
    alone, together = Run(0, uniform=1.0), Run(4, uniform=1.0)
    alone.take(0), together.take(0)
    assert seeds(alone.engine) == seeds(together.engine) and len(set(seeds(alone.engine).values())) == 9 * GROUP
    later = Run(0, uniform=1.0)
    later.take(0), later.take(1)
    assert len(set(seeds(later.engine).values())) == 2 * 9 * GROUP


@pytest.mark.parametrize(
    ("spare", "requested", "counted"),
    [(0, [6, 6, 6], (0, 0)), (1, [8, 4, 6], (1, 0)), (4, [14, 4], (4, 0)), (6, [18], (6, 0)), (99, [18], (6, 0))],
)
def test_only_what_the_spare_groups_lack_is_generated_later(
    spare: int, requested: list[int], counted: tuple[int, int]
) -> None:
    """Every group is uniform, so both rounds draw three; 99 is more than they can draw."""
    run = Run(spare, uniform=1.0)
    run.take(0)
    assert [len(requests) for requests in run.engine.requested] == requested and counts(run) == counted


def test_dropped_groups_are_counted_and_graded_but_not_in_the_batch() -> None:
    run = Run(5, uniform=0.0)
    batch = run.take(0)
    assert counts(run) == (5, 5) and len(run.graded) == 8 and len(batch) == 3 * GROUP
    source = PromptSource(ROWS, seed=1, shuffle=True)
    assert [graded.rollout.prompt for graded in batch[::GROUP]] == source.take(3)
    assert run.metrics["dynamic_sample/generated_groups"] == 3


def test_auto_follows_what_the_last_rollouts_needed() -> None:
    spares = SpareGroups(None, per_rollout=8, most=16)
    assert spares.wanted() == 0
    spares.remember(12, 8)  # a third is uniform: half a group more for each
    assert spares.wanted() == 5  # 1.15 * 0.5 * 8
    for _ in range(8):
        spares.remember(8, 8)
    assert spares.wanted() == 0
    for _ in range(8):
        spares.remember(24, 0)
    assert spares.wanted() == 16
    assert SpareGroups(None, 8, most=0).wanted() == 0 and SpareGroups(3, 8, most=0).wanted() == 0


def test_an_invalid_reward_of_a_dropped_group_does_not_end_the_run() -> None:
    source = PromptSource(ROWS, 2, True, label="spare-", taken=6)
    run = Run(2, uniform=0.0, bad=source.take(2)[1].prompt_id)
    assert len(run.take(0)) == 3 * GROUP and counts(run) == (2, 2)


def test_spare_groups_of_a_rollout_ahead_have_its_weights() -> None:
    run = Run(6, uniform=0.6, max_staleness=1)
    for number in range(4):
        stale = {number - graded.rollout.weights_version for graded in run.take(number)}
        assert stale == {min(number, 1)}
    alone = Run(0, uniform=0.6, max_staleness=1)
    assert {number - graded.rollout.weights_version for number in range(4) for graded in alone.take(number)} == {0, 1}


@pytest.mark.parametrize("spare", [0, 4])
def test_a_completion_is_drafted_from_once(spare: int) -> None:
    run, seen = Run(spare, uniform=1.0), list[Any]()
    drafts: Any = SimpleNamespace(remember=seen.extend)
    run.rollouts._stages = replace(run.rollouts._stages, drafts=drafts)
    run.take(0)
    assert len(seen) == sum(map(len, run.engine.requested)) == 9 * GROUP


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("rollout-*")}


@pytest.mark.parametrize("spare", [1, 3, 6, None])
def test_dumps_have_the_same_bytes(tmp_path: Path, spare: int | None) -> None:
    alone, together = Run(0, folder=tmp_path / "alone"), Run(spare, folder=tmp_path / "together")
    for number in range(5):
        alone.take(number), together.take(number)
    dumped = files(tmp_path / "alone")
    assert files(tmp_path / "together") == dumped
    assert {"rollout-000000.jsonl", "rollout-000000-draw-1.jsonl"} <= dumped.keys()


@pytest.mark.parametrize("groups", range(1, 14))
def test_a_run_killed_after_any_group_continues_with_the_same_batches(tmp_path: Path, groups: int) -> None:
    expected = Run(0)
    batches = [list(expected.take(number)) for number in range(3)]
    killed = Run(2, folder=tmp_path)
    killed.engine.killed_after = groups
    with suppress(KeyboardInterrupt):
        for number in range(3):
            killed.take(number)
    again = Run(2, folder=tmp_path)
    assert [list(again.take(number)) for number in range(3)] == batches
    assert not list(tmp_path.glob("*.partial"))
