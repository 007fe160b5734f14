"""The agent of --agent: a coroutine of a file, or a command that runs once for each rollout.

A command gets the row as JSON on its standard input, and the address and its key in the variables that the packages of
OpenAI and Anthropic read. The last line that it prints is its reward; without one, reward functions grade.
"""

import difflib
import inspect
import json
import os
import shlex
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from swift.rollout import multi_turns

from swift_megatron_grpo.generation.conversations.agents import Agent, AgentScheduler, register_agent
from swift_megatron_grpo.generation.conversations.programs import run_program
from swift_megatron_grpo.generation.protocol.api_key import API_KEY_FILE_VARIABLE, API_KEY_VARIABLE

_NOT_ITS_OWN = (  # variables of this process that a command does not get: secrets, and its place among the ranks
    API_KEY_VARIABLE, API_KEY_FILE_VARIABLE, "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT",
)  # fmt: skip
_SHOWN = 400  # characters of what a command prints


def scheduler_of(agent: str, scheduler: str | None, environment: str | None, load: Callable[[str], Any]) -> str:
    """Return the name in ms-swift's registry under which the agent of --agent runs; raise ValueError if it cannot.

    `scheduler` and `environment` are the flags whose place it takes. `load` imports a file of a user.
    """
    for flag, value in (("multi_turn_scheduler", scheduler), ("gym_env", environment)):
        if value is not None:
            raise ValueError(f"--agent {agent} takes the place of --{flag} {value}; leave one of the two out")
    file, _, name = agent.rpartition(":")
    if file.endswith(".py") and name.isidentifier():
        return _registered(agent, _coroutine(agent, file, name, load), name)
    _check_command(agent)
    return _registered(agent, command_agent(agent), agent)


def _registered(flag: str, agent: Agent, name: str) -> str:
    """Return the name under which a file has registered its coroutine, or register it."""
    for known, kind in multi_turns.items():
        if issubclass(kind, AgentScheduler) and kind.agent is agent:
            return str(known)
    try:
        register_agent(name)(agent)
    except ValueError as fault:
        raise ValueError(f"--agent {flag}: {fault}") from None
    return name


def _coroutine(agent: str, file: str, name: str, load: Callable[[str], Any]) -> Agent:
    if not Path(file).expanduser().is_file():
        raise ValueError(f"--agent {agent}: the file {Path(file).absolute()} does not exist; use another path")
    found = vars(load(file))
    coroutines = [known for known, value in found.items() if inspect.iscoroutinefunction(value)]
    if name not in coroutines:
        close = difflib.get_close_matches(name, coroutines) or coroutines
        advice = f"use {' or '.join(f'--agent {file}:{each}' for each in close)}" if close else "use another file"
        raise ValueError(f"--agent {agent}: the file has no coroutine (`async def`) of this name; {advice}")
    function: Agent = found[name]
    return function


def _check_command(agent: str) -> None:
    try:
        words = shlex.split(agent)
    except ValueError as error:
        raise ValueError(f"--agent {agent}: not the words of a command ({error}); give all quotes in pairs") from None
    if not words or shutil.which(words[0]) is None:
        raise ValueError(
            f"--agent {agent}: {words[0] if words else ''!r} is no program of this machine; use FILE.py:FUNCTION for a "
            'coroutine of a file, or a command such as "python agent.py"'
        )


@cache
def command_agent(command: str) -> Agent:
    """Return an agent that runs a command. `register_agent(NAME, seconds=3600)` gives it another limit of time."""
    words = shlex.split(command)

    async def agent(row: dict[str, Any], base_url: str, api_key: str) -> float | None:
        kept = {name: value for name, value in os.environ.items() if name not in _NOT_ITS_OWN}
        kept |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        kept |= {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": api_key}
        for name in ("NO_PROXY", "no_proxy"):
            kept[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))
        ended = await run_program(words, json.dumps(row), kept)
        if ended.stopped or ended.code:
            reason = ended.stopped or f"exit code {ended.code}"
            raise RuntimeError(f"the command: {reason}: {ended.errors.strip()[-_SHOWN:]}")
        lines = ended.output.strip().splitlines()
        try:
            return float(lines[-1]) if lines else None
        except ValueError:
            raise ValueError(f"the command's last line is {lines[-1]!r:.100}, which is not a number") from None

    return agent
