"""The programs of docs/datasets_and_rewards.md and docs/reward_models.md run, and do what the pages say."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from swift.dataset import load_dataset
from swift.infer_engine.protocol import RolloutInferRequest
from swift.rewards import orms, rm_plugins
from swift.rollout.gym_env import envs
from swift.rollout.multi_turn import GYMScheduler

from swift_megatron_grpo.grading.rewards import RewardError, RewardFunctions, call_reward_functions, gym_reward
from swift_megatron_grpo.types import Prompt, Rollout
from tests.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "datasets_and_rewards.md").read_text()


def program(name: str, page: str = PAGE) -> dict[str, Any]:
    """Run a program of the page and return its names."""
    blocks = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if block.startswith(f"# {name}\n")]
    assert len(blocks) == 1
    names: dict[str, Any] = {}
    exec(compile(blocks[0], name, "exec"), names)
    return names


def rollout(text: str, finish_reason: str = "stop", **columns: Any) -> Rollout:
    row = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], **columns}
    return Rollout(Prompt("p0", row), [1], [2], [-0.5], text, finish_reason, weights_version=0)


def call(function: Any, rollouts: list[Rollout]) -> list[Any]:
    rewards = RewardFunctions(["example"], [function])
    return [row[0] for row in call_reward_functions(rollouts, rewards, SimpleNamespace(global_step=1))]


def test_every_program_is_run_by_a_test() -> None:
    names = re.findall(r"```python\n# (\S+)\n", PAGE)
    assert len(names) == PAGE.count("```python") and set(names) == {"rewards.py", "reward_service.py", "guess.py"}


def test_the_reward_function_scores_skips_and_sees_why_a_completion_ended() -> None:
    function = program("rewards.py")["Digits"]()
    answers = [rollout("It is 7", solution="7"), rollout("8", solution="7"), rollout("7", "length", solution="7")]
    assert call(function, [*answers, rollout("7")]) == [1.0, 0.0, 0.0, None]


def test_the_judge_of_the_page_asks_about_rows_with_a_solution() -> None:
    page = (REPOSITORY / "docs" / "reward_models.md").read_text()
    assert page.count("```python") == 1
    judge = program("same_answer.py", page)["SameAnswer"]()
    assert rm_plugins.pop("same_answer") is type(judge)
    answered = {"messages": [{"role": "assistant", "content": "It is seven."}]}
    assert judge.request(answered) is None
    assert "1: 7\n2: It is seven." in judge.request({**answered, "solution": "7"})["messages"][0]["content"]
    assert [judge.score(text) for text in ("Yes.", "no", "Maybe")] == [1.0, 0.0, None]


def test_the_row_of_the_page_is_a_prompt_with_a_column_for_rewards(tmp_path: Path) -> None:
    [row] = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "data.jsonl"
    file.write_text(row)
    [loaded] = load_dataset([str(file)], remove_unused_columns=False)[0]
    assert loaded["messages"] == json.loads(row)["messages"] and loaded["solution"] == "7"


def test_the_programs_register_the_names_of_their_commands() -> None:
    for file, name, registry, flag in (
        ("rewards.py", "Digits", orms, "digits"),
        ("reward_service.py", "Service", orms, "service"),
        ("guess.py", "Guess", envs, "guess"),
    ):
        registry.pop(flag, None)
        assert program(file)[name] is registry.pop(flag)
        assert re.search(rf"`?--(?:reward_funcs|gym_env) {flag}\b", PAGE)


class Judge(BaseHTTPRequestHandler):
    failures = 0  # of the next requests
    seconds = 0.0

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(Judge.seconds)
        assert request["messages"][-1]["content"] == request["completion"]
        Judge.failures -= 1
        body = json.dumps({"score": len(request["completion"])}).encode()
        self.send_response(503 if Judge.failures >= 0 else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    Judge.failures, Judge.seconds = 0, 0.0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("REWARD_URL", f"http://127.0.0.1:{server.server_address[1]}/score")
    yield program("reward_service.py")["Service"]()
    server.shutdown()
    server.server_close()


def test_the_service_scores_every_completion_in_order(service: Any) -> None:
    assert call(service, [rollout("a" * length) for length in range(40)]) == list(map(float, range(40)))


def test_a_request_that_fails_once_is_sent_again_and_twice_stops_the_run(service: Any) -> None:
    Judge.failures = 1
    assert call(service, [rollout("abc")]) == [3.0]
    Judge.failures = 100
    with pytest.raises(RewardError, match="reward function example raised ClientResponseError"):
        call(service, [rollout("abc")])


def test_a_service_that_is_too_slow_stops_the_run(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_SECONDS", "0.05")
    Judge.seconds = 0.3
    with pytest.raises(RewardError, match="TimeoutError"):
        call(service, [rollout("abc")])


def test_the_environment_asks_until_the_answer_is_right_and_grades_it() -> None:
    envs["guess"] = program("guess.py")["Guess"]
    scheduler = GYMScheduler(gym_env="guess", max_turns=5)
    row = RolloutInferRequest(messages=[{"role": "user", "content": "-"}], uuid="a", data_dict={"number": "5"})

    async def play(*answers: str) -> dict[str, Any]:
        ends: list[dict[str, Any]] = []
        await scheduler.on_trajectory_start([row])
        for turn, answer in enumerate(answers, start=1):
            row.messages.append({"role": "assistant", "content": answer})
            ends.append(await scheduler.on_turn_end(row, None, turn))
            scheduler.step(row, None, turn)
        assert [end["done"] for end in ends] == [False] * (len(answers) - 1) + [True]
        infos: dict[str, Any] = ends[-1]["rollout_infos"]
        return infos

    infos = asyncio.run(play("x", "3", "8", "5"))
    asked = [message["content"] for message in row.messages if message["role"] == "user"]
    assert asked[0].startswith("Guess a number") and asked[1:] == ["That is no number.", "Higher.", "Lower."]
    assert infos["step_rewards"] == [-0.1, 0.0, 0.0, 1.0]
    assert call(gym_reward, [replace(rollout("5"), infos=infos)]) == [0.9]
