"""Stalls are found where recorded runs have collapsed, and in none of the runs that learn."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.output.console.callback import stall_watch
from swift_megatron_grpo.output.console.stalls import StallWatch, find_stalls
from swift_megatron_grpo.settings.run import Warnings
from tests.unit.settings.flags import defaults, of

# SmolLM2-135M-Instruct on sums: six runs of three trainers, which log reward and length, and the first 1,000 steps of
# a run of benchmarks/long_run.py with 8 groups a step, which logs everything.
RUNS = json.loads((Path(__file__).parent / "stall_series.json").read_text())
LEARNS = RUNS["this-1"]
COLLAPSED = 0.88  # share of equal groups after 100 steps of these runs
Rows = list[dict[str, Any]]

NORMAL = {"reward": 0.4, "frac_reward_zero_std": 0.5, "completions/mean_length": 100.0,
          "completions/clipped_ratio": 0.05, "entropy/entropy_mean": 0.5, "rollout/k3_kl": 1e-3}  # fmt: skip
# What each stall changes, and a change of the same kind that is none.
STALLS: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "_equal_groups": ({"frac_reward_zero_std": 0.9}, {"frac_reward_zero_std": 0.8}),
    "_reward_falls": ({"reward": 0.2}, {"reward": 0.34}),
    "_lengths_explode": (
        {"completions/mean_length": 250.0, "completions/clipped_ratio": 0.5},
        {"completions/mean_length": 250.0},  # longer, and not cut off: a model that learns to think
    ),
    "_entropy_collapses": ({"entropy/entropy_mean": 0.02}, {"entropy/entropy_mean": 0.1}),
    "_engine_drifts": ({"rollout/k3_kl": 0.05}, {"rollout/k3_kl": 8e-3}),
}
FLAGS = {
    "_equal_groups": {"dynamic_sample", "temperature", "num_generations"},
    "_reward_falls": {"lr", "beta"},
    "_lengths_explode": {"reward_funcs", "soft_cache_length", "overlong_filter", "max_completion_length"},
    "_entropy_collapses": {"epsilon_high", "entropy_coef", "temperature", "lr"},
    "_engine_drifts": {"rollout_importance_sampling_mode", "max_staleness", "lr"},
}


def rows_of(run: Mapping[str, list[float | None]]) -> Rows:
    return [dict(zip(run, values, strict=True)) for values in zip(*run.values(), strict=True)]


def noisy(changes: Mapping[str, float], steps: int, seed: int = 0) -> Rows:
    """Return steps around NORMAL with `changes`, with noise of 10 % of each value."""
    noise = random.Random(seed)
    return [{name: value * noise.gauss(1, 0.1) for name, value in (NORMAL | changes).items()} for _ in range(steps)]


def reported(rows: Rows) -> list[str]:
    watch = StallWatch({})
    return [line for row in rows for line in watch.report(row)]


def columns(rows: Rows) -> dict[str, list[float]]:
    return {name: [row[name] for row in rows] for name in NORMAL}


def kinds(rows: Rows) -> set[str]:
    """Return the kinds of stalls that the last step shows."""
    return set(find_stalls(columns(rows)))


@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_run_that_learns_has_no_stall(name: str) -> None:
    assert reported(rows_of(RUNS[name])) == []


@pytest.mark.parametrize("name", [name for name in RUNS if name != "long-run"])
def test_groups_that_are_equal_for_long_are_reported_once(name: str) -> None:
    """The recorded rewards with the share of equal groups that was read off them; the first steps learn with it."""
    watch, lines = StallWatch({}), {}
    for step, row in enumerate(rows_of(RUNS[name]), start=1):
        for line in watch.report(row | {"frac_reward_zero_std": COLLAPSED}):
            lines[step] = line
    [(step, line)] = lines.items()
    assert 90 <= step <= 120
    assert line.startswith("88% of the groups of the last 60 logged rollouts have equal rewards")


def test_a_run_whose_groups_are_all_equal_is_reported_after_20_rollouts() -> None:
    """The reward of a run on two CPU cores, which learned for six steps until each prompt had one completion."""
    rewards = [0.03, 0.06, 0.20, 0.44, 0.48, 0.52] + [0.52] * 20
    rows: Rows = [{"reward": x, "frac_reward_zero_std": float(step >= 6)} for step, x in enumerate(rewards)]
    assert reported(rows[:25]) == []
    [line] = reported(rows)
    assert line.startswith("100% of the groups of the last 20 logged rollouts")


def test_a_recorded_run_that_loses_what_it_has_learned_is_reported() -> None:
    """The recorded rewards to step 140, and then backwards."""
    rewards = LEARNS["reward"][:140]
    assert reported([{"reward": reward} for reward in rewards]) == []
    [line] = reported([{"reward": reward} for reward in rewards + rewards[::-1]])
    assert line.startswith("the reward has fallen from 0.3") and "--lr" in line


@pytest.mark.parametrize("kind", STALLS)
@pytest.mark.parametrize("seed", range(3))
def test_each_stall_is_found_alone_and_a_lesser_change_is_not(kind: str, seed: int) -> None:
    stalled, normal = STALLS[kind]
    begin = noisy({}, 60, seed)
    assert kinds(begin) == set()
    assert kinds(begin + noisy(normal, 60, seed + 10)) == set()
    assert kinds(begin + noisy(stalled, 60, seed + 10)) == {kind}


@pytest.mark.parametrize("kind", STALLS)
def test_a_sentence_names_flags_that_exist(kind: str) -> None:
    [line] = find_stalls(columns(noisy({}, 60) + noisy(STALLS[kind][0], 60))).values()
    assert set(re.findall(r"--(\w+)", line)) == FLAGS[kind] <= set(defaults())
    assert "\n" not in line


def test_noise_alone_is_no_stall() -> None:
    for seed in range(5):
        assert reported(noisy({}, 300, seed)) == []


def test_negative_rewards_and_rewards_around_zero_are_compared() -> None:
    for shift in (-10.0, -0.4):
        rows = noisy({}, 60) + noisy({"reward": 0.1}, 60)
        shifted = [row | {"reward": row["reward"] + shift} for row in rows]
        assert kinds(shifted) == (set() if shift == -10.0 else {"_reward_falls"})  # 0.3 is 3 % of 10


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "0.5", None, True, [0.5], 10**400])
@pytest.mark.parametrize("metric", NORMAL)
def test_a_value_that_is_not_a_finite_number_is_left_out(metric: str, value: object) -> None:
    rows: Rows = noisy({}, 100)
    assert reported([row | {metric: value} for row in rows]) == []
    assert reported([row | {metric: value} if step % 3 == 0 else row for step, row in enumerate(rows)]) == []


@pytest.mark.parametrize("metric", NORMAL)
def test_a_metric_that_is_not_logged_is_no_stall_and_hides_no_other(metric: str) -> None:
    for kind, (stalled, _) in STALLS.items():
        rows = noisy({}, 60) + noisy(stalled, 60)
        lines = reported([{name: x for name, x in row.items() if name != metric} for row in rows])
        needed = {"_equal_groups": {"frac_reward_zero_std", "reward"}}.get(kind, set(stalled))
        assert len(lines) == (0 if metric in needed else 1), kind
    assert reported([{} for _ in range(100)]) == []


def test_a_stall_is_reported_again_after_it_has_ended() -> None:
    stalled, normal = {"frac_reward_zero_std": 0.95}, {"frac_reward_zero_std": 0.3}
    once = noisy(stalled, 100) + noisy(normal, 12) + noisy(stalled, 200)
    assert len(reported(once)) == 1
    assert len(reported(noisy(stalled, 100) + noisy(normal, 150) + noisy(stalled, 100))) == 2


def _logged(folder: Path, rows: Rows) -> None:
    lines = [json.dumps(row | {"iteration": f"{step}/500"}) for step, row in enumerate(rows, start=1)]
    (folder / "logging.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("done, expected", [(59, 1), (60, 0)])
def test_a_run_that_resumes_continues_with_its_log(tmp_path: Path, done: int, expected: int) -> None:
    rows = noisy({"frac_reward_zero_std": 0.95}, 61)
    _logged(tmp_path, rows)  # the run was killed after its last checkpoint
    watch = stall_watch(tmp_path, steps_done=done)
    assert len([line for row in rows[done:] for line in watch.report(row)]) == expected


def test_a_new_run_ignores_a_log_that_is_there(tmp_path: Path) -> None:
    rows = noisy({"frac_reward_zero_std": 0.95}, 61)
    _logged(tmp_path, rows[:59])
    watch = stall_watch(tmp_path, steps_done=0)
    assert watch.report(rows[59]) == []


def test_a_run_that_resumes_without_its_log_starts_with_no_history(tmp_path: Path) -> None:
    assert stall_watch(tmp_path, steps_done=7).report(NORMAL) == []


@pytest.mark.parametrize(
    "typed", [{"stall_warnings": False}, {"rollout_only": True}, {"rollout_replay": "/rollouts"}], ids=str
)
def test_a_run_that_must_not_warn_does_not_watch(typed: dict[str, Any]) -> None:
    assert of(Warnings).watches_stalls
    assert not of(Warnings, **typed).watches_stalls
