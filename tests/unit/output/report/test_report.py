"""The content of a report: values of the log, completions within a limit, histograms, and data that stays data."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.cli.main import main
from swift_megatron_grpo.output.report.completions import read_completions
from swift_megatron_grpo.output.report.contents import contents, differing, load, names_of
from swift_megatron_grpo.output.report.histograms import histogram
from swift_megatron_grpo.output.report.page import asset, embedded, page
from swift_megatron_grpo.output.report.run_files import NoRun, Table, read_run, thinned
from tests.paths import REPOSITORY
from tests.unit.output.report.example_run import HOSTILE, make_run, step_row, write_completions, write_log


def data_of(html: str) -> dict[str, Any]:
    """Return the data of a page as a browser finds it: up to the first end of a script element."""
    text = html.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    data: dict[str, Any] = json.loads(text)
    return data


def test_the_command_writes_one_file_with_everything_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    html = (run / "report.html").read_text()
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "") and "https://" not in html
    assert "default-src 'none'" in html
    (made,) = data_of(html)["runs"]
    assert made["step"] == 6 and made["total_steps"] == 10 and not made["ended"]
    assert made["training"]["values"]["reward"] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert made["remaining"] == pytest.approx(4 * 1.2)
    names = {path.name for path in run.iterdir()}
    assert names == {"args.json", "completions.jsonl", "logging.jsonl", "report.html"}


def test_the_command_runs_without_any_installed_package(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    command = [sys.executable, "-S", "-m", "swift_megatron_grpo.cli", "report", str(run)]
    subprocess.run(command, check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    assert (run / "report.html").is_file()


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert "give the --output_dir of a run" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_text_of_a_model_stays_data(tmp_path: Path) -> None:
    html = page(contents(load([make_run(tmp_path / "run")]), "now"))
    assert html.count("</script>") == 2 and "\u2028" not in html
    texts = {row["text"] for row in data_of(html)["runs"][0]["completions"]["rows"]}
    assert HOSTILE in texts


def test_a_mark_of_the_template_and_half_a_character_are_data() -> None:
    value = {"text": "<!--SCRIPT--> \ud83d"}
    html = page({"runs": [], **value})
    assert html.count('"use strict"') == 1
    html.encode()
    assert "<" not in embedded(value)


def test_secrets_are_not_in_the_page(tmp_path: Path) -> None:
    assert "do-not-show" not in page(contents(load([make_run(tmp_path / "run")]), "now"))


@pytest.mark.parametrize(
    "setting",
    [
        {"api_keys": ["do-not-show"]},
        {"hub_token": "do-not-show"},
        {"tracker": {"WANDB_API_KEY": "do-not-show", "project": "p"}},
        {"servers": [{"headers": {"Authorization": "Bearer do-not-show"}}]},
        {"aws": {"aws_secret_access_key": {"value": "do-not-show"}}},
        {"vllm_engine_kwargs": '{"a": {"auth-tokens": ["do-not-show"]}}'},
        {"db_passwd": "do-not-show"},
        {"vllm_engine_kwargs": ' {"api_key": "do-not-show"}'},
        {"servers": '[{"api_key": "do-not-show"}]'},
        {"servers": ['{"api_key": "do-not-show"}']},
    ],
)
def test_secrets_are_found_by_any_name_and_at_any_depth(tmp_path: Path, setting: dict[str, Any]) -> None:
    html = page(contents(load([make_run(tmp_path / "run", **setting)]), "now"))
    assert "do-not-show" not in html and html.count("(not shown)") >= 2


def test_numbers_of_tokens_and_files_of_tokenizers_are_no_secrets(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", max_tokens=4096, tokenizer="t", new_special_tokens=["<a>"], engine='{"x": 1}')
    shown = contents(load([run]), "now")["runs"][0]["settings"]
    names = ("max_tokens", "tokenizer", "new_special_tokens", "engine")
    assert [shown[name] for name in names] == ["4096", "t", "<a>", '{"x": 1}']


@pytest.mark.parametrize(
    "values",
    [
        {"reward": 1e308}, {"reward": -1e308}, {"reward": 10**400}, {"reward": "x"}, {"reward": None},
        {"iteration": "1/²"}, {"iteration": "²/3"}, {"iteration": None}, {"iteration": "9" * 5000}, {"iteration": -3},
        {"elapsed_time": float("nan")}, {"elapsed_time": [10**400]},
    ],
)  # fmt: skip
def test_an_absurd_value_of_the_log_costs_itself_alone(tmp_path: Path, values: dict[str, Any]) -> None:
    write_log(tmp_path, [step_row(1, 3), {**step_row(2, 3), **values}, step_row(3, 3), step_row(4, 4)])
    with (tmp_path / "logging.jsonl").open("a") as file:
        file.write("[" * 10**5 + "\n")
    (run,) = data_of(page(contents(load([tmp_path]), "now")))["runs"]
    assert {1, 3} <= set(run["training"]["steps"]) and run["training"]["values"]["loss"][-1] == 0.004


@pytest.mark.parametrize(
    "values",
    [
        {"letters": 1e308, "short": -1e308}, {"letters": 10**400}, {"total_reward": "x"}, {"rollout": "x"},
        {"rollout": None}, {"rollout": 10**400}, {"tokens": "many"}, {"tokens": 10**400}, {"prompt": []},
        {"completion": 5}, {"truncated": "no"}, {"gen_step": None}, {"advantages": float("nan")},
    ],
)  # fmt: skip
def test_an_absurd_value_of_a_completion_costs_its_row_alone(tmp_path: Path, values: dict[str, Any]) -> None:
    run = make_run(tmp_path)
    path = run / "completions.jsonl"
    first, *others = path.read_text().split("\n")
    path.write_text("\n".join([json.dumps({**json.loads(first), **values}), *others]))
    (made,) = data_of(page(contents(load([run]), "now")))["runs"]
    assert len(made["completions"]["rows"]) in (11, 12) and len(made["histograms"]["charts"]) == 4
    assert all(sum(chart["newest"]) for chart in made["histograms"]["charts"])


def test_a_value_that_is_not_finite_is_named(tmp_path: Path) -> None:
    write_log(tmp_path, [step_row(1, 3), {**step_row(2, 3), "loss": float("nan")}, step_row(3, 3)])
    files = read_run(tmp_path)
    assert files.training.values["loss"] == [0.001, None, 0.003]
    assert "loss is not finite at step 2" in files.notes
    page(contents(load([tmp_path]), "now"))


def test_evaluations_and_a_line_being_written_are_no_steps(tmp_path: Path) -> None:
    write_log(tmp_path, [step_row(1, 3), {"eval_reward": 0.5, "iteration": "1/3"}, step_row(2, 3)])
    with (tmp_path / "logging.jsonl").open("a") as file:
        file.write('{"loss": 0.')
    files = read_run(tmp_path)
    assert files.training.steps == [1, 2] and files.evaluation.values == {"eval_reward": [0.5]}
    assert not files.ended and "1 incomplete line(s) of logging.jsonl are left out" in files.notes


def test_only_the_last_run_of_a_folder_is_shown(tmp_path: Path) -> None:
    write_log(tmp_path, [step_row(step, 5) for step in (1, 2, 3)])
    write_log(tmp_path, [{"last_model_checkpoint": "x"}, step_row(1, 9), {**step_row(2, 9), "reward": 9.0}])
    files = read_run(tmp_path)
    assert files.training.steps == [1, 2] and files.total_steps == 9
    assert files.training.values["reward"] == [0.1, 9.0]
    write_completions(tmp_path, 3, ["of the first run"])
    write_completions(tmp_path, 2, ["of the second"])
    completions = read_completions(tmp_path, 2**20)
    assert completions is not None
    assert [(row.rollout, row.text) for row in completions.rows] == [(0, "of the second"), (1, "of the second")]


def test_a_run_without_a_step_has_a_page_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text("{}")
    with pytest.raises(NoRun):
        read_run(tmp_path)
    (tmp_path / "args.json").write_text('{"lr": 1}')
    (run,) = contents(load([tmp_path]), "now")["runs"]
    assert (
        run["reasons"]["curves"] == "no step has been logged yet"
        and "--log_completions" in run["reasons"]["completions"]
    )


def test_completions_are_limited_to_the_first_and_newest_rollouts(tmp_path: Path) -> None:
    write_completions(tmp_path, 100, [letter * 50 for letter in "abcd"])
    size = (tmp_path / "completions.jsonl").stat().st_size
    completions = read_completions(tmp_path, size // 10)
    assert completions is not None and completions.left_out is not None
    rollouts = [row.rollout for row in completions.rows]
    assert rollouts[0] == 0 and rollouts[-1] == 99 and 5 <= len(set(rollouts)) <= 10
    assert all(rollouts.count(rollout) == 4 for rollout in set(rollouts))  # whole ones
    gap = next(i for i in range(100) if i not in rollouts)
    assert completions.left_out.startswith(f"rollouts {gap} to ")


def test_a_line_end_inside_a_completion_is_no_line(tmp_path: Path) -> None:
    write_completions(tmp_path, 1, ["a\u2028b\x85c\x0bd"])
    completions = read_completions(tmp_path, 2**20)
    assert completions is not None and [row.text for row in completions.rows] == ["a\u2028b\x85c\x0bd"]


def test_rewards_stand_in_the_order_of_their_functions(tmp_path: Path) -> None:
    write_completions(tmp_path, 1, ["x", "y"])
    completions = read_completions(tmp_path, 2**20)
    assert completions is not None and completions.functions == ["letters", "short"]
    assert [row.rewards for row in completions.rows] == [[0.0, 0.5], [0.1, None]]
    assert [row.total for row in completions.rows] == [0.0, 0.1] and completions.rows[0].truncated is True


def test_histograms_share_their_bins() -> None:
    made = histogram("reward", [0.0, 0.1, 0.1], [1.0], bins=10)
    assert made is not None
    assert made["first"] == [1, 2, 0, 0, 0, 0, 0, 0, 0, 0] and made["newest"] == [0] * 9 + [1]
    assert histogram("reward", [], []) is None
    for value in (2.0, 1e17, -3.4e38):
        constant = histogram("reward", [value], [value, value])
        assert constant is not None and sum(constant["newest"]) == 2 and constant["low"] < value < constant["high"]


def test_long_curves_are_thinned_to_means_and_extremes() -> None:
    table = Table(list(range(1, 11)), {"loss": [float(i) for i in range(10)], "clip_ratio/high_max": [0.0] * 9 + [7.0]})
    thin, size = thinned(table, 4)
    assert size == 3 and thin.steps == [3, 6, 9, 10]
    assert thin.values == {"loss": [1.0, 4.0, 7.0, 9.0], "clip_ratio/high_max": [0.0, 0.0, 0.0, 7.0]}


def test_runs_are_compared_by_the_settings_that_differ(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "one" / "out", lr=0.005), make_run(tmp_path / "two" / "out", lr=0.001, output_dir="b")]
    assert names_of(runs) == ["one/out", "two/out"]
    data = contents(load(runs), "now")
    assert data["differing"] == [["lr", "0.005", "0.001"]]
    assert differing([{}]) == []


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_script_of_the_page_parses(tmp_path: Path) -> None:
    script = page({"runs": []}).split("<script>")[1].split("</script>")[0]
    (tmp_path / "page.js").write_text(script)
    subprocess.run(["node", "--check", tmp_path / "page.js"], check=True)


def test_the_script_never_parses_text_as_html() -> None:
    scripts = "".join(asset(name) for name in ("values.js", "charts.js", "sections.js", "completions.js", "main.js"))
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert name not in scripts
