"""The agent of --agent: coroutines of files, and commands, which are real processes and call the real address."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from swift.rollout import multi_turns
from swift.utils import import_external_file

from swift_megatron_grpo.generation.conversations.agent_flag import command_agent, scheduler_of
from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from swift_megatron_grpo.types import AGENT_ERROR
from tests.unit.generation.conversations.answering import Engine, run

FILE = """
from swift_megatron_grpo.generation.conversations.agents import register_agent

async def plain(row, base_url, api_key): ...

@register_agent("its own name", seconds=7)
async def named(row, base_url, api_key): ...

async def short(row): ...

def no_coroutine(row, base_url, api_key): ...

async def gym_scheduler(row, base_url, api_key): ...
"""
CALL = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
body = json.dumps({"messages": row["messages"]}).encode()
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, body, head)) as answer:
    text = json.load(answer)["choices"][0]["message"]["content"]
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "agents.py").write_text(FILE)
    return str(tmp_path / "agents.py")


def select(agent: str, scheduler: str | None = None, environment: str | None = None) -> str:
    return scheduler_of(agent, scheduler, environment, import_external_file)


def test_a_coroutine_runs_under_its_own_name_or_that_of_its_file(file: str) -> None:
    assert select(f"{file}:plain") == "plain" and multi_turns["plain"].seconds == 600
    assert select(f"{file}:plain") == "plain"  # a second time
    assert select(f"{file}:named") == "its own name" and multi_turns["its own name"].seconds == 7


def test_a_command_is_an_agent_once() -> None:
    assert select(f"{sys.executable} -c 'print(1)'") == select(f"{sys.executable} -c 'print(1)'")


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("{file}:plane", "no coroutine .* of this name; use --agent {file}:plain"),
        ("{file}:no_coroutine", "no coroutine .*; use --agent {file}:"),
        ("{file}:short", r"cannot be called .* use `async def short\(row, base_url, api_key\)`"),
        ("{file}:gym_scheduler", "there is a scheduler 'gym_scheduler' already; use another name"),
        ("{file}", "'{file}' is no program of this machine; use FILE.py:FUNCTION"),
        ("missing.py:plain", "missing.py does not exist; use another path"),
        ("nothing-here --flag", "'nothing-here' is no program of this machine; use FILE.py:FUNCTION"),
        ("", "'' is no program"),
        ("python 'agent.py", "give all quotes in pairs"),
    ],
)
def test_what_is_no_agent_is_refused(file: str, agent: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("{file}", file)):
        select(agent.replace("{file}", file))


def test_an_agent_excludes_schedulers_and_environments(file: str) -> None:
    with pytest.raises(ValueError, match="takes the place of --multi_turn_scheduler math; leave one of the two out"):
        select(f"{file}:plain", scheduler="math")
    with pytest.raises(ValueError, match="takes the place of --gym_env lake"):
        select(f"{file}:plain", environment="lake")


def command(tmp_path: Path, code: str) -> Any:
    path = tmp_path / "program.py"
    path.write_text(code)
    return command_agent(f"{sys.executable} {path}")


def test_a_command_calls_the_policy_and_prints_its_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "a secret")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("NO_PROXY", "example.org")
    check = (
        f"assert not {{{API_KEY_VARIABLE!r}, 'RANK'}} & os.environ.keys() and row['number'] == 0\n"
        "assert os.environ['NO_PROXY'] == 'example.org,127.0.0.1'\n"
        "assert os.environ['ANTHROPIC_BASE_URL'] + '/v1' == os.environ['OPENAI_BASE_URL']\n"
        "assert os.environ['ANTHROPIC_API_KEY'] == os.environ['OPENAI_API_KEY']\n"
        "print('it says', text)\nprint(0.25)"
    )
    _, [completion] = run(Engine, command(tmp_path, CALL + check))
    assert completion.infos == {"total_reward": 0.25, "num_turns": 1} and completion.text == "answer 1"


def test_a_command_that_prints_nothing_is_graded_by_others(tmp_path: Path) -> None:
    _, [completion] = run(Engine, command(tmp_path, CALL))
    assert completion.infos == {"num_turns": 1}


@pytest.mark.parametrize(
    ("ending", "error"),
    [
        ("print('good')", "ValueError: the command's last line is 'good', which is not a number"),
        ("raise LookupError('no such tool')", "RuntimeError: the command: exit code 1: .*LookupError: no such tool"),
        ("os.kill(os.getpid(), 9)", "RuntimeError: the command: exit code 137"),
        ("sys.stdout.write('1' * 2**21)", "RuntimeError: the command: it wrote more than 1048576 bytes: "),
        (
            "sys.stderr.write('1' * 2**21); sys.stderr.flush(); import time; time.sleep(60)",
            "RuntimeError: the command: it wrote",
        ),
        ("sys.stdout.buffer.write(b'\\xff\\xfe')", "ValueError: the command's last line is"),
    ],
)
def test_a_command_that_fails_has_an_error_in_its_completion(tmp_path: Path, ending: str, error: str) -> None:
    _, [completion] = run(Engine, command(tmp_path, CALL + ending))
    assert completion.completion_ids == [101] and re.match(error, completion.infos[AGENT_ERROR], re.DOTALL)


def test_a_program_that_cannot_start_costs_its_rollout(tmp_path: Path) -> None:
    _, [completion] = run(Engine, command_agent(str(tmp_path / "gone")))
    assert "CannotStart: [Errno 2] No such file or directory" in completion.infos[AGENT_ERROR]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends_soon(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


@pytest.mark.parametrize("hangs", [True, False])
def test_processes_that_a_command_leaves_are_killed(tmp_path: Path, hangs: bool) -> None:
    """After it ended by itself, and after its time, although they hold its output open."""
    code = f"""
import subprocess
child = subprocess.Popen(["sleep", "600"])
open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
print(1)
{"child.wait()" if hangs else ""}
"""
    began = time.monotonic()
    _, [completion] = run(Engine, command(tmp_path, CALL + code), seconds=3.0)
    assert time.monotonic() - began < 20
    expected = "it did not end within 3 seconds" if hangs else None
    assert completion.infos.get(AGENT_ERROR) == expected
    assert all(ends_soon(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_a_command_ends_with_the_process_of_its_engine(tmp_path: Path) -> None:
    """The engine's process is killed, which lets it clean up nothing. So ends what the command has started."""
    code = f"""
import asyncio, os
from swift_megatron_grpo.generation.conversations.programs import run_program
words = ["sh", "-c", "sleep 600 & echo $$ $! > {tmp_path / "pids"}; wait"]
asyncio.run(run_program(words, "", dict(os.environ)))
"""
    engine = os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pids").is_file() or not (tmp_path / "pids").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and all(map(is_running, pids))
    os.kill(engine, 9)
    os.waitpid(engine, 0)
    assert all(map(ends_soon, pids))
