"""Plugins of the recipes: a task of reasoning_gym as dataset and reward, and the calculator of several turns."""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.forking.client import run_script
from tests.paths import REPOSITORY

pytest.importorskip("reasoning_gym", reason="scripts/setup_venv.sh --recipes installs it")
PLUGINS = REPOSITORY / "templates" / "plugins"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("rows")
    run_script(PLUGINS / "reasoning_task.py", folder, "chain_sum", '{"max_terms": 2}', "Go.", kind="upstream")
    return {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held_out")
    }


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    from swift.utils import import_external_file

    path = list(sys.path)
    for name in ("reasoning_task.py", "boxed_number.py", "calculator.py", "calculator_agent.py"):
        import_external_file(str(PLUGINS / name))
    sys.path[:] = path


def test_no_problem_is_both_trained_and_held_out(rows: dict[str, list[dict[str, Any]]]) -> None:
    questions = [row["messages"][0]["content"] for part in rows.values() for row in part]
    assert len(set(questions)) == len(questions) > 4000 and len(rows["held_out"]) == -(-len(questions) // 16)
    assert all(question.endswith(" = Go.") for question in questions)


def test_examples_are_neither_trained_nor_held_out(tmp_path: Path) -> None:
    form = r"{metadata[expression]} = \boxed{{{answer}}}"
    run_script(PLUGINS / "reasoning_task.py", tmp_path, "chain_sum", '{"max_terms": 2}', "", kind="upstream")
    run_script(PLUGINS / "worked_examples.py", tmp_path, form)
    rows = [json.loads(line) for file in tmp_path.glob("*.jsonl") for line in file.read_text().splitlines()]
    *examples, _ = rows[0]["messages"]
    assert all(row["messages"][:-1] == examples for row in rows)
    asked, answers = ([turn["content"] for turn in examples[first::2]] for first in (0, 1))
    assert len(asked) == 4 and not {row["messages"][-1]["content"] for row in rows} & set(asked)
    for question, answer in zip(asked, answers, strict=True):
        expression, box = answer.split(" = ")
        assert question.endswith(f" {expression} =") and box == rf"\boxed{{{eval(expression)}}}"


def test_the_reward_is_the_score_of_the_task(rows: dict[str, list[dict[str, Any]]]) -> None:
    from swift.rewards import orms

    row = next(row for row in rows["train"] if len(row["solution"]) == 3 and row["solution"].isdigit())
    right = row["solution"]
    completions = [right, f"4 + 4 is {right}.", f"{right}.0", f"1{right}", "4", "", f"4 <answer>{right}</answer> 4"]
    rewards = orms["reasoning_task"]()(completions, problem=[row["problem"]] * len(completions), messages=[])
    assert rewards == pytest.approx([1, 1, 1, 3 / 4, 0, 0, 1])


@pytest.mark.parametrize(
    ("task", "text"), [("syllogism", "No, no: {}."), ("spell_backward", "It is {}"), ("word_sorting", "{}")]
)
def test_the_form_of_the_solution_decides_what_is_read(task: str, text: str) -> None:
    from reasoning_gym import create_dataset
    from reasoning_task import score

    row = create_dataset(task, size=1, seed=0)[0]
    assert score(text.format(row["answer"]), row) == 1
    assert score(text.format("nothing") + " Perhaps", row) < 1


def test_the_score_is_asked_even_if_a_task_has_no_solution() -> None:
    from reasoning_gym import create_dataset
    from reasoning_task import score

    row = create_dataset("propositional_logic", size=1, seed=0)[0]
    assert row["answer"] is None and score(row["metadata"]["example_answer"], row) == 1 > score("no idea", row)


def test_a_box_earns_nothing_unless_it_holds_a_number_alone() -> None:
    """Contract: `accuracy` accepts a calculation. If it no longer does, boxed_number.py can go."""
    from swift.rewards import orms

    def rewards(name: str, *completions: str) -> list[float]:
        return orms[name]()(list(completions), solution=["5"] * len(completions), messages=[])

    copied, good = r"\boxed{7 + 4 - 6}", (r"It is \boxed{5}.", r"\boxed{5.0}", r"\boxed{-5}", r"\boxed{12}")
    assert rewards("accuracy", copied) == [1]
    assert rewards("boxed_number", *good) == [1, 1, 0, 0]
    hacks = [copied, rf"{copied} \boxed{{4}}", rf"\boxed{{5}} {copied}", r"\boxed{5} \boxed{6}", r"\boxed{5 apples}",
             "5", "<answer>5</answer>", r"\boxed", r"\boxed{}", r"\boxed{5", r"\boxed{\boxed{5}}", ""]  # fmt: skip
    assert rewards("boxed_number", *hacks) == [0] * len(hacks)


def conversation(problem: str, *responses: str) -> list[tuple[str, float, bool]]:
    """Return the question, and what the environment answers to each response: text, reward and end."""
    from swift.rollout.gym_env import envs

    async def turns() -> list[tuple[str, float, bool]]:
        environment = envs["calculator"]({})
        request = SimpleNamespace(messages=[{"role": "user", "content": "Add."}], data_dict={"problem": problem})
        answers = [((await environment.reset(request))[0], 0.0, False)]
        for response in responses:
            answers.append((await environment.step([{"role": "assistant", "content": response}]))[:3])
        await environment.close()
        return answers

    return asyncio.run(turns())


def test_the_calculator_is_called_and_the_answer_scored(rows: dict[str, list[dict[str, Any]]]) -> None:
    row = rows["train"][0]
    expression = json.loads(row["problem"])["metadata"]["expression"]
    question, result, end = conversation(row["problem"], f"Sure: calc({expression})", row["solution"])
    assert question[0].startswith("Add. ") and "calc(" in question[0]
    assert result == (f"The result is {row['solution']}. Answer with the number only.", 0.2, False)
    assert end == ("", 1.0, True)


def test_a_call_with_the_right_result_pays_once(rows: dict[str, list[dict[str, Any]]]) -> None:
    problem = rows["train"][0]["problem"]
    right = f"calc({json.loads(problem)['metadata']['expression']})"
    rewards = [reward for _, reward, _ in conversation(problem, "calc(1e9)", "calc(1 / 7)", right, right, "nothing")]
    assert rewards == [0.0, 0.0, 0.0, 0.2, 0.0, 0.0]


@pytest.mark.parametrize("text", ["9**9**9", "1/0", "(1", "open('x')", "1(2)", "1e9", "9" * 81, ""])
def test_what_is_not_arithmetic_is_not_calculated(text: str, rows: dict[str, list[dict[str, Any]]]) -> None:
    answer, reward, ended = conversation(rows["train"][0]["problem"], f"calc({text})")[1]
    assert answer.startswith("The result is unknown: ") and (reward, ended) == (0.0, False)


def test_the_agent_runs_its_tool_and_its_answer_is_scored(rows: dict[str, list[dict[str, Any]]]) -> None:
    from swift.rollout import multi_turns

    from swift_megatron_grpo.generation.conversations.chat import Answer, Call
    from swift_megatron_grpo.generation.conversations.proxy import Proxy

    row = rows["train"][0]
    arguments = json.dumps({"expression": json.loads(row["problem"])["metadata"]["expression"]})
    tool_call = {"id": "a", "type": "function", "function": {"name": "calculate", "arguments": arguments}}

    class Rollout:
        """Asks for the tool, then answers with its result."""

        def __init__(self) -> None:
            self.calls: list[Call] = []

        def ask(self, call: Call) -> Future[Answer]:
            self.calls.append(call)
            text, tools = ("", [tool_call]) if len(self.calls) == 1 else (call.messages[-1]["content"], [])
            answered: Future[Answer] = Future()
            answered.set_result(Answer(text, tools, "stop", 1, 1))
            return answered

        def withdraw(self, call: Call) -> None: ...

    rollout, proxy = Rollout(), Proxy()
    with proxy.serving(rollout) as key:
        reward = asyncio.run(multi_turns["calculator_agent"].agent({**row}, proxy.url, key))
    assert reward == 1.0 and [len(call.messages) for call in rollout.calls] == [1, 3]
    assert rollout.calls[1].messages[2] == {"role": "tool", "content": row["solution"], "tool_call_id": "a"}
    assert rollout.calls[0].tools and rollout.calls[0].tools[0]["function"]["name"] == "calculate"
