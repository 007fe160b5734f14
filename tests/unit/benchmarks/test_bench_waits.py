"""benchmarks/bench_waits.py: the flags of each run, what a run has logged, and the pages, on made-up runs."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.learning.settings import Paths
from benchmarks.harness.waits import page
from benchmarks.harness.waits.cases import CASES, CURVES, MODELS, REMEDIES, settings_of, small, steps_of, variants_of
from benchmarks.harness.waits.commands import model_tokens, server_flags, trainer_flags
from benchmarks.harness.waits.rows import UNIFORM_EVERY, write_rows
from benchmarks.harness.waits.runs import read
from tests.paths import REPOSITORY

PATHS = Paths(Path("model"), Path("rows.jsonl"), Path("output"))
SPARE = {variant.name: variant for variant in REMEDIES["spare"].variants}


def flags_of(case: str, variant: str) -> dict[str, str]:
    [found] = [each for each in REMEDIES[CASES[case].remedy].variants if each.name == variant]
    url = "http://h:1" if REMEDIES[CASES[case].remedy].served else ""
    settings = settings_of(CASES[case])
    command = trainer_flags(CASES[case], found, settings, PATHS, MODELS[CASES[case].model].shape, url)
    return {name[2:]: value for name, value in pairwise(command) if name.startswith("--")}  # the last of equal ones


# ---- runs


@pytest.mark.parametrize("case", CASES)
def test_variants_of_this_package_differ_in_their_own_flags_alone(case: str) -> None:
    ours = [variant for variant in variants_of(CASES[case]) if variant.arm == "ours"]
    first, *others = ours
    for other in others:
        own = {text[2:] for each in (first, other) for text in each.flags.split() if text.startswith("--")}
        mine, yours = flags_of(case, first.name), flags_of(case, other.name)
        assert {name for name in mine | yours if mine.get(name) != yours.get(name)} <= own


@pytest.mark.parametrize("case", CASES)
def test_steps_that_count_are_whole_rollouts_of_every_variant(case: str) -> None:
    for each in (CASES[case], small(CASES[case])):
        for variant in variants_of(each):
            counted = steps_of(each, variant) - each.warm_up - each.cool_down
            assert counted > 0 and counted % variant.rollout == each.warm_up % variant.rollout == 0


def test_a_server_and_its_trainer_have_the_same_model_and_lengths() -> None:
    for case in ("flight-smollm2", "flight-8b"):
        shape, settings = MODELS[CASES[case].model].shape, settings_of(CASES[case])
        command = server_flags(CASES[case], settings, PATHS.model, shape, 8000, shares_gpu=False)
        server = dict(zip(command[::2], command[1::2], strict=True))
        trainer = flags_of(case, "flight")
        for name in ("model", "model_type", "template", "torch_dtype", "vllm_max_model_len"):
            assert server[f"--{name}"] == trainer[name]
        assert trainer["vllm_mode"] == "server" and int(trainer["vllm_max_model_len"]) >= 512


def test_random_weights_have_room_for_every_turn_of_their_rows(tmp_path: Path) -> None:
    case = CASES["turns-8b"]
    settings = settings_of(case)
    rows = write_rows(tmp_path, settings.prompt_tokens, case.lengths, settings.generations, 4).read_text().splitlines()
    lengths = [json.loads(row)["lengths"] for row in rows]
    assert {(len(group), len(turns)) for group in lengths for turns in group} == {(8, 4)}
    assert max(tokens for group in lengths for turns in group for tokens in turns) == settings.completion_tokens
    assert model_tokens(case, settings) > settings.prompt_tokens + 4 * settings.completion_tokens


def test_exactly_a_quarter_of_the_prompts_has_equal_rewards(tmp_path: Path) -> None:
    rows = [json.loads(row) for row in write_rows(tmp_path, 128, "", 8, 1).read_text().splitlines()]
    assert UNIFORM_EVERY == 4 and len(rows) > 48 * 32 and "lengths" not in rows[0]
    for begin in range(0, 320, 32):
        assert sum(row["uniform"] for row in rows[begin : begin + 32]) == 8


def test_a_step_is_the_mean_of_those_that_count(tmp_path: Path) -> None:
    case = small(CASES["flight-8b"])
    seconds = [9.0, 1.0, 2.0, 7.0]
    names = ("time/generation", "completions/mean_length", "rollout/staleness_max")  # of steps with a rollout
    rows = [
        {"learning_rate": 0, "iteration": f"{step}/4", "train_speed(s/it)": sum(seconds[:step]) / step}
        | dict.fromkeys(() if step == 3 else names, step)
        for step in range(1, 5)
    ]
    flight = variants_of(case)[1]
    (tmp_path / "logging.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = read(case, flight, tmp_path)
    assert (case.steps, case.warm_up, case.cool_down) == (4, 1, 1) and result["step"] == 1.5
    assert result["metrics"] == {"completions/mean_length": 2, "time/generation": 1, "rollout/staleness_max": 2}
    (tmp_path / "logging.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    assert read(case, flight, tmp_path)["step"] is None


# ---- pages


def test_the_pages_have_the_tables_of_the_measured_runs() -> None:
    for path, (begin, end), text in page.tables(REPOSITORY):
        assert f"{begin}{text}{end}" in (REPOSITORY / path).read_text(), "run `python -m benchmarks.bench_waits report`"


def write_case(folder: Path, name: str, steps: dict[str, float | None], **metrics: float) -> None:
    runs = [{"variant": variant, "round": 0, "step": step, "metrics": metrics} for variant, step in steps.items()]
    (folder / f"waits-{name}.json").write_text(json.dumps({"runs": runs}))


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    folder = tmp_path / "benchmarks" / "h200" / "parts"
    folder.mkdir(parents=True)
    return folder


def test_speedups_are_over_the_variant_that_a_remedy_changes(parts: Path, tmp_path: Path) -> None:
    write_case(parts, "spare-smollm2", {"draws": 3.0, "spare": 2.0, "ms-swift": None}, **{"time/generation": 1.25})
    write_case(parts, "steps-8b", {"one": 20.0, "two": 12.0, "four": 10.0})
    cases = page.read_cases(tmp_path)
    assert "| 2.00 s | 1.25 s | **1.50** | not measured yet | - | - | 0.00, 0 | 1.25 |" in page.measured(cases, {})
    assert "| ms-swift's trainer | not measured yet | - | - | 15.50 s |" in page.measured(cases, {"ms-swift": 15.5})
    assert "| 4 | 1.5, 3 | not measured yet | - | 10.00 s | **2.00** |" in page.steps_on_a_rollout(cases)


def test_staleness_counts_the_steps_before_on_the_same_rollout() -> None:
    four = next(variant for variant in REMEDIES["steps"].variants if variant.name == "four")
    assert page.Row(four, [{"metrics": {}}]).staleness == "1.50, 3"
    flight = {"rollout/staleness": 1.75, "rollout/staleness_max": 2.0}
    assert page.Row(SPARE["spare"], [{"metrics": flight}]).staleness == "1.75, 2"


def test_simulated_rows_give_way_to_measured_ones(parts: Path, tmp_path: Path) -> None:
    rows = page.simulated(page.read_cases(tmp_path))
    assert all(f"| {name} |" in rows for name in page.REPLACED)
    write_case(parts, "flight-8b", {"ahead": 12.0, "flight": 10.0})
    assert page.simulated(page.read_cases(tmp_path)) == rows  # one row of the case is missing
    write_case(parts, "flight-8b", {"ahead": 12.0, "flight": 10.0, "one-ahead": 14.0})
    left = page.simulated(page.read_cases(tmp_path)).splitlines()
    assert set(rows.splitlines()) - set(left) == {
        row for row in rows.splitlines() if row.startswith(("| `--max_staleness 1", "| `--max_staleness 2", "| 2, in"))
    }


def curve(reward: float, accuracy: float) -> dict[str, Any]:
    held_out = [{"step": step, "accuracy": accuracy} for step in (0, 40)]
    return {"settings": {"steps": 40}, "exit_code": 0, "reward": [reward] * 40, "held_out": held_out}


def test_a_curve_is_compared_with_the_range_of_the_synchronous_seeds() -> None:
    band = [curve(0.1, 0.2), curve(0.3, 0.4)]
    table = page.curves(
        band, {"spare": [curve(0.05, 0.3)], "flight": [curve(0.25, 0.6), {**curve(0, 0), "reward": []}]}
    )
    assert "| 1 | 2 (by at most 0.050), 0, 0 | 0, 2, 0 | 30.0% (20.0% to 40.0%) |" in table
    assert "| 1 | 0, 2, 0 | 0, 0, 2 | 60.0% (20.0% to 40.0%) |" in table
    assert page.curves(band, {"spare": [], "flight": []}).count("| 0 | not measured yet | not measured yet | - |") == 2


def test_the_chain_measures_every_case_and_curve() -> None:
    chain = (REPOSITORY / "benchmarks" / "waits_chain.sh").read_text()
    assert set(re.findall(r"([a-z]+-(?:smollm2|8b)):\d:\d+", chain)) == {*CASES, "peers-8b"}
    assert set(re.findall(r"(?<![\w-])([a-z]+):\d:\d+", chain)) == set(CURVES)
