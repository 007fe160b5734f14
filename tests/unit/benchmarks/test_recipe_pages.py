"""benchmarks/recipes.py: what a run has logged, what vLLM answers, and the pages, on made-up runs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.harness.recipes import page, plans
from benchmarks.harness.recipes.known import RECIPES, TRIES
from benchmarks.harness.recipes.runs import last_weights, logged, write_programs
from benchmarks.harness.recipes.served import compared, in_turns
from benchmarks.harness.slow_tool import LONGEST, SHORTEST
from benchmarks.recipes import parse, wait
from tests.paths import REPOSITORY

STEPS = 40


def run_of(recipe: str = "full", **changed: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "3 + 4 ="}]
    return {
        "recipe": recipe, "overridden": [], "device": "H", "gpus": 1, "versions": {"vllm": "1"}, "exit_code": 0,
        "seconds_of_process": 180.0, "gpu_hours": 0.05, "problems": 300, "constant": 0.02,
        "settings": {"train_iters": STEPS}, "reward": [step / STEPS for step in range(STEPS)],
        "seconds": [0.5 * step for step in range(1, STEPS + 1)], "length": [9.0] * STEPS,
        "uniform": [0.25] * (STEPS // 2) + [0.75] * (STEPS // 2),
        "held_out": [{"step": 0, "accuracy": 0.07}, {"step": STEPS, "accuracy": 0.31}],
        "served": {"problems": 300, "before": 0.08, "after": 0.32, "completions": [
            {"before": [*messages, {"role": "assistant", "content": "I"}],
             "after": [*messages, {"role": "assistant", "content": "7"}]}]},
    } | changed  # fmt: skip


def test_the_pages_are_those_of_the_measured_runs() -> None:
    written = page.of_repository(REPOSITORY)
    in_repository = {file.name: file.read_text() for file in (REPOSITORY / page.FOLDER).iterdir()}
    assert in_repository == written, "run `python -m benchmarks.recipes report`"


def test_a_page_has_accuracies_costs_completions_and_how_to_serve() -> None:
    pages = page.pages({"full": run_of(), "dynamic": run_of("dynamic", gpu_hours=0.25)}, [])
    text = pages["dynamic.md"]
    for expected in ("7.0% before, 31.0% after", "0.25 GPU hours", "3.0 minutes for 40 steps", "user: 3 + 4 =",
                     "-- after\nassistant: 7", "vllm serve runs/dynamic/output/checkpoint-40\n", "| 40 | 31.0% |",
                     "answers 32.0% of 300", "bash templates/recipe.sh dynamic runs/dynamic\n"):  # fmt: skip
        assert expected in text, expected
    assert "## Against `full`" in text and "| 50% | 0.3 | 0.25 |" in text
    assert "## Against" not in pages["full.md"]
    assert ElementTree.fromstring(pages["dynamic.svg"]).tag.endswith("svg")
    assert "[`full`](full.md)" in pages["index.md"] and "| `lora` |" in pages["index.md"]


def test_turns_that_both_completions_share_are_shown_once() -> None:
    turns = [{"role": role, "content": text} for role, text in (("user", "1 + 1 ="), ("assistant", "2"), ("user", "Q"))]
    pair = {name: [*turns, {"role": "assistant", "content": name}] for name in ("before", "after")}
    text = page.pages({"full": run_of(served=run_of()["served"] | {"completions": [pair]})}, [])["full.md"]
    asked = "user: 1 + 1 =\nassistant: 2\nuser: Q\n"
    assert f"{asked}-- before\nassistant: before\n-- after\nassistant: after\n" in text


def test_a_merged_adapter_is_served_from_its_own_folder() -> None:
    assert "vllm serve runs/lora/output/checkpoint-40-merged\n" in page.pages({"lora": run_of("lora")}, [])["lora.md"]


@pytest.mark.parametrize("changed", [{"exit_code": None}, {"served": None}, {"reward": [0.5]}])
def test_a_run_that_did_not_end_has_no_page(changed: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "h200" / "parts"
    folder.mkdir(parents=True)
    (folder / "recipe-full.json").write_text(json.dumps(run_of(**changed)))
    assert list(page.of_repository(tmp_path)) == ["index.md"]
    (folder / "recipe-full.json").write_text(json.dumps(run_of()))
    assert {"full.md", "full.svg"} < set(page.of_repository(tmp_path))


def test_the_page_of_the_tool_compares_conversations_that_wait(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "h200" / "parts"
    folder.mkdir(parents=True)
    runs = {"tool": ("tool", 0.5, 0.25), "wait-lockstep": ("tool", 1.0, 0.75), "wait-slow": ("tool", 0.8, 0.2)}
    for name, (recipe, step, waits) in runs.items():
        served = {} if name == "tool" else {"served": None}
        seconds = [step * number for number in range(1, STEPS + 1)]
        run = run_of(recipe, seconds=seconds, generation=[waits] * STEPS, **served)
        (folder / f"recipe-{name}.json").write_text(json.dumps(run))
    (folder / "recipe-wait-slow-lockstep.json").write_text(json.dumps(run_of("tool", exit_code=None, served=None)))
    text = page.of_repository(tmp_path)["tool.md"]
    rows = [line for line in text.partition("## Waiting")[2].splitlines() if line.startswith("| ")][2:5]
    assert [row.split(" | ")[1:3] for row in rows] == [["0.50 s", "50%"], ["1.00 s", "75%"], ["0.80 s", "25%"]]
    assert "tool of 0.05 to 1 s" in rows[2] and "(before)" in rows[1]
    assert "## Waiting" not in page.pages({"full": run_of(), "tool": run_of("tool")}, [])["tool.md"]


def test_a_variant_in_lockstep_needs_the_older_package_and_no_other_has_it(tmp_path: Path) -> None:
    places = ["--model", "m", "--work", str(tmp_path), "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="--variant lockstep needs --old"):
        wait(parse(["wait", "--variant", "lockstep", *places]))
    with pytest.raises(SystemExit, match="--variant slow takes no --old"):
        wait(parse(["wait", "--variant", "slow", "--old", str(tmp_path), *places]))


def test_a_slow_calculator_gives_the_same_answers_later(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (REPOSITORY / "templates" / "plugins", REPOSITORY / "benchmarks" / "harness" / "recipes"):
        monkeypatch.syspath_prepend(folder)
    pytest.importorskip("reasoning_gym", reason="scripts/setup_venv.sh --recipes installs it")
    from calculator import Calculator
    from slow_calculator import SlowCalculator
    from swift.rollout.gym_env import envs

    assert envs["calculator"] is SlowCalculator
    envs["calculator"] = Calculator  # for other tests
    problem = {"question": "12 + 30 =", "answer": "42", "metadata": {"source_dataset": "chain_sum"}}
    config = SimpleNamespace(data_dict={"problem": json.dumps(problem)}, messages=[{"role": "user", "content": "?"}])

    async def answers(kind: type[Calculator]) -> list[Any]:
        environment = kind({})
        await environment.reset(config)
        return [await environment.step([{"role": "assistant", "content": text}]) for text in ("calc(12 + 30)", "42")]

    began = time.monotonic()
    slow = asyncio.run(answers(SlowCalculator))
    taken = time.monotonic() - began
    assert slow == asyncio.run(answers(Calculator)) and slow[1][2]
    assert SHORTEST <= taken < LONGEST + 1


def test_tasks_that_were_tried_are_in_a_table_of_the_index(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "h200" / "parts"
    folder.mkdir(parents=True)
    (folder / "recipe-try-spelling.json").write_text(json.dumps(run_of("lora")))
    written = page.of_repository(tmp_path)
    assert list(written) == ["index.md"] and "| `spell_backward` |" in written["index.md"]
    assert "| 40 | 0.237 | 0.738 | 7.0% | 31.0% | 2.0% | 75% |" in written["index.md"]


@pytest.mark.parametrize("task", TRIES)
def test_every_task_to_try_makes_problems_that_it_solves(task: str) -> None:
    pytest.importorskip("reasoning_gym", reason="scripts/setup_venv.sh --recipes installs it")
    from reasoning_gym import create_dataset, get_score_answer_fn

    name, settings, _ = TRIES[task]
    for problem in create_dataset(name, size=4, seed=0, **json.loads(settings)):
        assert get_score_answer_fn(name)(problem["answer"], problem) == 1


def test_larger_models_are_marked_as_not_run() -> None:
    plan = {"model": "m", "what": "an adapter", "gpus": 8, "gpu": "H", "memory": 60.0, "of": 85.0, "seconds": 9.0,
            "hours": 1.2, "gpu_hours": 10.0, "command": "bash x.sh"}  # fmt: skip
    pages = page.pages({}, [plan])
    assert "None of these runs was made here" in pages["large.md"] and "| m | an adapter | 8 H |" in pages["large.md"]
    assert all((REPOSITORY / "templates" / large.template).is_file() for large in plans.LARGE)


def test_the_template_has_every_recipe_and_refuses_another(tmp_path: Path) -> None:
    template = REPOSITORY / "templates" / "recipe.sh"
    (tmp_path / "megatron").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "swift").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "train.jsonl").touch()
    for name in ("megatron", "swift"):
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL": "m", "TEACHER": "t"}
    for recipe in RECIPES.values():
        printed = subprocess.check_output([template, recipe.name, tmp_path], env=environment, text=True)
        assert all(flag in printed for flag in recipe.flags.split()), recipe.name
    refused = subprocess.run([template, "none", tmp_path], env=environment, capture_output=True, text=True)
    assert refused.returncode == 2 and "there is no recipe none; use full" in refused.stderr


def test_a_teacher_is_trained_first_and_once(tmp_path: Path) -> None:
    """The trainer of this test only writes its flags and a checkpoint."""
    template = REPOSITORY / "templates" / "recipe.sh"
    (tmp_path / "megatron").write_text(
        '#!/bin/sh\necho "$@"\nmkdir -p "$OUTPUT/checkpoint-90" "$OUTPUT/checkpoint-200"\n'
    )
    (tmp_path / "megatron").chmod(0o755)
    for folder in (tmp_path, tmp_path / "teacher"):
        folder.mkdir(exist_ok=True)
        (folder / "model").mkdir(exist_ok=True)
        (folder / "train.jsonl").touch()

    def runs(**more: str) -> list[str]:
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **more}
        command = [template, "teacher", tmp_path, "--seed", "7"]
        return subprocess.check_output(command, env=environment, text=True).splitlines()

    first, second = runs()
    assert "--teacher_model" not in first and f"--model {tmp_path}/teacher/model " in first
    assert (
        f"--teacher_model {tmp_path}/teacher/output/checkpoint-200 " in second
        and f"--model {tmp_path}/model " in second
    )
    assert all(run.endswith("--seed 7") and "--model_type llama" in run for run in (first, second))
    assert runs() == [second]
    [other] = runs(TEACHER="mine", MODEL="m")
    assert "--teacher_model mine " in other and "--model m " in other and "--model_type" not in other


def test_a_log_gives_settings_series_and_accuracies(tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text(json.dumps({"eval_steps": 2, "lr": 1e-5}))
    steps = [
        {"reward": step / 8, "frac_reward_zero_std": 0.5, "completions/mean_length": 4, "time/generation": 0.2,
         "learning_rate": 1e-5, "iteration": f"{step}/4", "train_speed(s/it)": seconds}
        for step, seconds in enumerate([1, 1, 3, 2.5], 1)
    ]  # fmt: skip
    rows = [{"eval_pass@1": 0.1, "iteration": "0/4"}, *steps, {"eval_pass@1": 0.4, "iteration": "4/4"}, {"end": 1}]
    (tmp_path / "logging.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = logged(tmp_path)
    assert run["generation"] == [0.2] * 4
    assert run["settings"]["lr"] == 1e-5 and run["uniform"] == [0.5] * 4 and run["reward"][-1] == 0.5
    assert run["held_out"] == [{"step": 0, "accuracy": 0.1}, {"step": 4, "accuracy": 0.4}]
    assert run["seconds"] == [1, 2, 3, 4]  # the third step began with an evaluation of 6 seconds


def test_the_last_weights_are_the_merged_ones_of_an_adapter(tmp_path: Path) -> None:
    assert last_weights(tmp_path, merged=False) is None
    for name in ("checkpoint-5", "checkpoint-10", "checkpoint-10-merged"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    assert last_weights(tmp_path, merged=False) == tmp_path / "checkpoint-10"
    assert last_weights(tmp_path, merged=True) == tmp_path / "checkpoint-10-merged"


def test_one_learned_and_one_wrong_problem_are_shown() -> None:
    def answered(*rewards: float) -> list[tuple[list[dict[str, str]], float]]:
        return [([{"role": "user", "content": str(place)}], reward) for place, reward in enumerate(rewards)]

    result = compared(answered(1, 0, 0, 0.5), answered(1, 0, 1.2, 1))
    assert (result["problems"], result["before"], result["after"]) == (4, 0.25, 0.75)
    assert [pair["after"][0]["content"] for pair in result["completions"]] == ["2", "1"]
    assert len(compared(answered(0, 1), answered(1, 1))["completions"]) == 2


def test_conversations_end_with_an_answer_or_after_three_turns() -> None:
    from swift.rollout.gym_env import envs

    class Tool:
        def __init__(self, config: dict[str, Any]) -> None: ...

        async def reset(self, config: Any) -> tuple[str, dict[str, Any], str]:
            return config.data_dict["question"], {}, ""

        async def step(self, messages: list[dict[str, str]]) -> tuple[str, float, bool, dict[str, Any]]:
            said = messages[-1]["content"]
            return "again", 0.2 if said == "call" else 1.0, said == "7", {}

    def answer(conversations: list[list[dict[str, str]]]) -> list[str]:
        return [
            "7" if len(messages) > 2 and messages[0]["content"] == "short" else "call" for messages in conversations
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(envs, "tool", Tool)
        rows = [{"messages": [], "question": question} for question in ("short", "endless")]
        (short, short_reward), (endless, endless_reward) = asyncio.run(in_turns(answer, rows, "tool"))
    assert [message["content"] for message in short] == ["short", "call", "again", "7"] and short_reward == 1.2
    assert len(endless) == 6 and endless_reward == pytest.approx(0.6)


def test_the_programs_of_templates_run_without_console_scripts(tmp_path: Path) -> None:
    folder = write_programs(tmp_path)
    printed = subprocess.run([folder / "python", "-c", "print(3 + 4)"], capture_output=True, text=True)
    assert printed.stdout == "7\n" and {file.name for file in folder.iterdir()} > {"megatron", "swift"}


def test_flags_of_the_trainer_follow_two_dashes() -> None:
    args = parse(["run", "--recipe", "full", "--model", "m", "--work", "w", "--out", "o", "--", "--lr", "1e-4"])
    assert args.flags == ["--lr", "1e-4"]
