"""The plugin that runs environments of verifiers: a real environment calls the policy at the proxy's real address."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from swift.rollout import multi_turns
from swift.utils import import_external_file

from swift_megatron_grpo.types import AGENT_ERROR
from tests.paths import REPOSITORY
from tests.unit.generation.conversations.answering import Engine, run

pytest.importorskip("verifiers", reason="verifiers is an extra of its own")
ENVIRONMENT = """
import verifiers
from datasets import Dataset

def load_environment(most):
    rows = Dataset.from_list([{"question": f"Say {n}.", "answer": str(n)} for n in range(most)])

    async def score(completion, answer):
        return len(completion[-1]["content"]) + int(answer) / (1 if answer != "2" else 0)

    return verifiers.SingleTurnEnv(dataset=rows, rubric=verifiers.Rubric(funcs=[score]), system_prompt="Be short.")
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "made_numbers.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("VERIFIERS_ENVIRONMENT", "made-numbers")
    monkeypatch.setenv("VERIFIERS_ARGUMENTS", '{"most": 3}')
    before, path = dict(multi_turns), list(sys.path)
    yield import_external_file(str(REPOSITORY / "templates" / "plugins" / "verifiers_agent.py"))
    sys.path[:] = path
    multi_turns.clear()
    multi_turns.update(before)


def test_an_environment_is_an_agent_by_its_name(plugin: Any) -> None:
    """It keeps the signals of the run, which verifiers takes over."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    rows = plugin.rows()
    assert len(rows) == 3 and json.loads(rows[1]["verifiers"])["answer"] == "1"
    prompt = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Say 1."}]
    assert rows[1]["messages"] == prompt

    async def agent(row: dict[str, Any], url: str, key: str) -> float:
        reward: float = await plugin.verifiers_agent(rows[1], url, key)
        return reward

    engine, completions = run(Engine, agent, many=4)
    assert all(request.messages == prompt for request in engine.requests)
    assert [completion.infos["total_reward"] for completion in completions] == [len("answer 1") + 1] * 4

    del multi_turns["agent"]

    async def failing(row: dict[str, Any], url: str, key: str) -> float:
        reward: float = await plugin.verifiers_agent({"verifiers": '{"prompt": 7, "example_id": 1}'}, url, key)
        return reward

    _, [completion] = run(Engine, failing)
    assert AGENT_ERROR in completion.infos
