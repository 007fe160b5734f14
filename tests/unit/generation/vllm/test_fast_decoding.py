"""With the fast schedule and the fast outputs vLLM schedules, reports and remembers the same in every step."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched import utils
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

from swift_megatron_grpo.generation.vllm.fast_outputs import BATCH, FastOutputs, speed_up_decoding
from swift_megatron_grpo.generation.vllm.fast_schedule import FastSchedule, RunningRequests
from swift_megatron_grpo.generation.vllm.known_scheduler import digest, known_scheduler
from tests.unit.generation.vllm.scheduled_runs import BLOCK, VOCABULARY, ScheduledRun, Setting, params, write_config

FINAL, DELTA = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_config(folder)
    return folder


class Pair:
    """A stock run and a fast one, which do the same."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.stock, self.fast = ScheduledRun(setting, folder), ScheduledRun(setting, folder)
        scheduler = self.fast.scheduler
        known = known_scheduler(scheduler)
        assert known is not None
        self.running = running = RunningRequests(scheduler)
        self.slow_steps = 0  # that vLLM's schedule has done
        stock = scheduler.schedule

        def counted(*throttle: bool) -> Any:
            self.slow_steps += bool(scheduler.running)
            return stock(*throttle)

        scheduler.schedule = counted
        scheduler.schedule = FastSchedule(scheduler, known, running)
        scheduler.update_from_output = FastOutputs(scheduler, known, running)
        self.steps, self.has_preempted = 0, False
        self.reports: list[Any] = []

    def both(self, action: Any) -> None:
        action(self.stock)
        action(self.fast)

    def step(self) -> None:
        expected, found = self.stock.step(), self.fast.step()
        assert found == expected
        assert self.fast.state() == self.stock.state()
        self.reports += found[1]
        self.steps += 1
        self.has_preempted |= any(request.num_preemptions for request in self.stock.scheduler.requests.values())

    def finish(self) -> list[Any]:
        while not self.stock.is_over:
            self.step()
        assert self.fast.is_over
        assert not self.fast.processor.has_unfinished_requests()
        assert self.running.keys() <= self.fast.scheduler.finished_req_ids  # others are forgotten
        return self.reports


def prompt(generator: random.Random, longest: int = 30) -> list[int]:
    """Return a prompt; many begin with the same tokens."""
    shared = [5] * generator.choice([0, 0, 8, 16])
    return shared + [generator.randrange(2, VOCABULARY) for _ in range(generator.randint(1, longest))]


def some_params(generator: random.Random, **values: Any) -> Any:
    return params(
        **{
            "max_tokens": generator.randint(1, 60),
            "logprobs": generator.choice([None, 0, 0]),
            "stop_token_ids": generator.choice([None, [7], [8, 9]]),
            "min_tokens": 0,
            "output_kind": generator.choice([FINAL, FINAL, FINAL, DELTA]),
            "ignore_eos": generator.random() < 0.5,
            **values,
        }
    )


def some_images(generator: random.Random, tokens: int) -> list[tuple[int, int]]:
    """Return the places of images in a prompt, in every third prompt. Some are at its end."""
    if tokens < 12 or generator.random() < 2 / 3:
        return []
    return generator.choice([[(tokens - 6, 6)], [(1, 4), (7, 5)], [(0, tokens % 5 + 3)]])


RUNNERS = [{"is_async": True, "v2_runner": True}, {"is_async": True, "v2_runner": False},
           {"is_async": False, "v2_runner": False}, {"is_async": False, "v2_runner": True}]  # fmt: skip
SETTINGS = {
    "roomy": {},
    "preempted": {"blocks": 45},
    "waiting": {"most_running": 5},
    "waiting_and_preempted": {"most_running": 8, "blocks": 40},
    "chunked": {"batched": 32},
    "uncached": {"caches": False},
    "uncached_and_preempted": {"caches": False, "blocks": 45},
    "more_logprobs": {"extra_columns": 2},
}
DRAFTED = {"roomy": {}, "preempted": {"blocks": 45}, "waiting_and_preempted": {"most_running": 8, "blocks": 40},
           "chunked": {"batched": 32}, "uncached": {"caches": False}}  # fmt: skip


@pytest.mark.parametrize("runner", RUNNERS, ids=["async2", "async1", "sync1", "sync2"])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_step_is_that_of_vllm(name: str, runner: dict[str, bool], folder: Path) -> None:
    """Requests that come and go in between change nothing."""
    setting = replace(Setting(), **SETTINGS[name], **runner)
    compare(name, setting, folder, seeds=2 if setting.is_async and setting.v2_runner else 1)


@pytest.mark.parametrize("name", DRAFTED)
def test_every_step_with_drafts_is_that_of_vllm(name: str, folder: Path) -> None:
    compare(name, replace(Setting(), drafts=3, **DRAFTED[name]), folder, seeds=2)


def compare(name: str, setting: Setting, folder: Path, seeds: int) -> None:
    preempted = False
    for seed in range(seeds):
        generator = random.Random(f"{name} {seed}")
        pair = Pair(setting, folder)
        names = [f"r{index}" for index in range(16)]
        for number, request in enumerate(names):
            tokens = prompt(generator)
            made = (request, tokens, some_params(generator, seed=number), some_images(generator, len(tokens)))
            pair.both(lambda run, made=made: run.add(*made))
            for _ in range(generator.choice([0, 0, 0, 3])):
                pair.step()
            if generator.random() < 0.1:
                left = generator.sample(names[: number + 1], 1)
                pair.both(lambda run, left=left: run.abort(left))
        pair.finish()
        assert pair.slow_steps < pair.steps
        preempted |= pair.has_preempted
    assert preempted or "preempted" not in name


@pytest.mark.parametrize("runner", RUNNERS, ids=["async2", "async1", "sync1", "sync2"])
def test_most_steps_are_fast_and_few_reach_the_output_processor(runner: dict[str, bool], folder: Path) -> None:
    pair = Pair(Setting(**runner), folder)
    for index in range(16):
        made = (f"r{index}", [3] * (index + 5), params(max_tokens=64, logprobs=0, output_kind=FINAL, ignore_eos=True))
        pair.both(lambda run, made=made: run.add(*made))
    reports = pair.finish()
    assert len(reports) == 16 and {len(report[4]) for report in reports} == {64}
    assert pair.slow_steps <= 2 and pair.steps >= 64
    sizes = [tokens for step in pair.fast.passed_on for _, tokens in step]
    assert max(sizes) == BATCH and len(sizes) < 16 * 5
    assert len([step for step in pair.stock.passed_on for _ in step]) == 16 * 64


def test_most_steps_with_drafts_are_fast(folder: Path) -> None:
    pair = Pair(Setting(drafts=3), folder)
    for index in range(24):  # 1 draft each, and 3 each when some have ended
        values = {"max_tokens": 30 + index, "logprobs": 0, "output_kind": FINAL, "ignore_eos": True}
        pair.both(lambda run, i=index, values=values: run.add(f"r{i}", [3] * (i + 5), params(**values)))
    reports = pair.finish()
    assert sorted(len(report[4]) for report in reports) == list(range(30, 54))
    assert pair.slow_steps <= 2 and pair.steps < 50
    assert len([step for step in pair.fast.passed_on for _ in step]) < 24 * 4


@pytest.mark.parametrize(("is_async", "drafts"), [(True, 0), (False, 0), (True, 3)])
def test_what_stops_a_request_is_judged_by_vllm(is_async: bool, drafts: int, folder: Path) -> None:
    stops = [
        {"stop_token_ids": [token], "min_tokens": least, "ignore_eos": ignore}
        for token in (3, 4, 5)
        for least in (0, 20)
        for ignore in (True, False)
    ]
    stops += [{"max_tokens": 1}, {"max_tokens": 2}, {"max_tokens": 3}, {"max_tokens": 500}]  # more than the model takes
    pair = Pair(Setting(is_async=is_async, drafts=drafts), folder)
    for index, stop in enumerate(stops):
        values = {"max_tokens": 60, "logprobs": 0, "output_kind": FINAL, **stop}
        pair.both(lambda run, i=index, values=values: run.add(f"r{i}", [3 + i] * 6, params(**values)))
    reports = pair.finish()
    assert {report[5] for report in reports} == {"stop", "length"}
    assert len(reports) == len(stops)


def test_a_text_is_scored_while_others_run(folder: Path) -> None:
    pair = Pair(Setting(), folder)
    completion = {"max_tokens": 50, "logprobs": 0, "output_kind": FINAL, "ignore_eos": True}
    pair.both(lambda run: run.add("a", [4] * 9, params(**completion)))
    for _ in range(10):
        pair.step()
    pair.both(lambda run: run.add("scored", [4] * 11, params(max_tokens=1, temperature=0.0, prompt_logprobs=0)))
    assert {report[0]: report[9] for report in pair.finish()} == {"a": None, "scored": 11}


def test_a_request_that_is_aborted_or_preempted_loses_what_is_held(folder: Path) -> None:
    pair = Pair(Setting(), folder)
    values = {"max_tokens": 80, "logprobs": 0, "output_kind": FINAL, "ignore_eos": True}
    for name in ("a", "b", "c"):
        pair.both(lambda run, name=name: run.add(name, [6] * 7, params(**values)))
    for _ in range(12):
        pair.step()
    pair.both(lambda run: run.abort(["b"]))
    pair.step()
    pair.both(lambda run: run.add("b", [6] * 3, params(**values)))  # another request of the same name
    for _ in range(9):
        pair.step()
    pair.both(lambda run: run.scheduler.reset_prefix_cache(reset_running_requests=True))
    reports = pair.finish()
    assert sorted((report[0], len(report[4])) for report in reports) == [("a", 80), ("b", 80), ("c", 80)]


@pytest.mark.parametrize("steps", range(5, 5 + BLOCK))  # in one case a block is full when vLLM is paused
def test_nothing_is_scheduled_while_vllm_is_paused(steps: int, folder: Path) -> None:
    pair = Pair(Setting(), folder)
    pair.both(lambda run: run.add("a", [6] * 7, params(max_tokens=40, output_kind=FINAL, ignore_eos=True)))
    for _ in range(steps):
        pair.step()
    for state in (PauseState.PAUSED_ALL, PauseState.PAUSED_NEW, PauseState.UNPAUSED):
        pair.both(lambda run, state=state: run.scheduler.set_pause_state(state))
        if state is PauseState.PAUSED_ALL:
            paused = [run.scheduler.schedule() for run in (pair.stock, pair.fast)]
            assert [output.num_scheduled_tokens for output in paused] == [{}, {}]
        for _ in range(3):
            pair.step()
    pair.finish()


def test_other_schedulers_and_settings_are_left_to_vllm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(**values: Any) -> bool:
        scheduler = ScheduledRun(Setting(), folder).scheduler
        for name, value in values.items():
            setattr(scheduler, name, value)
        return known_scheduler(scheduler) is not None

    assert fits()
    for name in ("log_stats", "connector", "use_eagle", "num_spec_tokens", "use_pp", "dcp_world_size"):
        assert not fits(**{name: 2}), name
    assert not fits(finished_req_ids_dict={})
    drafts = {"num_spec_tokens": 3, "dynamic_sd_lookup": [3] * 33}
    assert fits(**drafts) and not fits(**drafts, use_v2_model_runner=False)

    scheduler = ScheduledRun(Setting(), folder).scheduler
    scheduler.__class__ = type("Other", (type(scheduler),), {})
    assert known_scheduler(scheduler) is None

    with monkeypatch.context() as patched:
        patched.setattr(Scheduler, "_update_after_schedule", lambda self, output: None)
        assert not fits()
    with monkeypatch.context() as patched:
        patched.delattr(utils, "check_stop")
        assert digest() == "unknown" and not fits()
    assert fits()

    class Engine:
        engine_core = object()  # of another process

    assert not speed_up_decoding(Engine())
