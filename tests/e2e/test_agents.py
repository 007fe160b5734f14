"""Agents that call the policy as they would call OpenAI's: what they sampled is trained, and a failure costs one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from tests.support.hf_check import check_with_transformers
from tests.support.runs import PLUGINS, REWARDS, Finished, megatron_rlhf, read_json_lines
from tests.support.servers import KEY, RolloutServer

pytestmark = pytest.mark.e2e
AGENTS, ROOM = str(PLUGINS / "calling_agents.py"), ["--vllm_max_model_len", "1024"]
FLAGS = ["--torch_dtype", "float32", "--fp16", "false", "--train_iters", "1", "--save_steps", "100", "--clip_grad",
         "100", "--max_tokens_per_micro_batch", "1024", "--seed_completions", "true"]  # fmt: skip
LOCAL = ["--use_gym_env", "true", *ROOM, "--external_plugins", AGENTS, str(REWARDS)]


def rows(path: Path, **columns: list[Any]) -> Path:
    """Write rows with these columns, one for each of their values."""
    content = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    questions = [
        {"messages": [{"role": "user", "content": f"{i}?"}], "letters": "abc"} | more for i, more in enumerate(content)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in questions))
    return path


def train(
    folder: Path, model: Path, dataset: Path, name: str, flags: list[str], environment: Mapping[str, str] | None = None
) -> tuple[Finished, list[Any]]:
    dumped = folder / f"{name}-rollouts"
    flags = [*FLAGS, "--rollout_dump", str(dumped), *flags]
    run = megatron_rlhf(model, dataset, folder / name, 2, flags, {API_KEY_VARIABLE: KEY, **(environment or {})})
    assert run.code == 0, run.output[-4000:]
    return run, read_json_lines(dumped / "rollout-000000.jsonl")


def test_what_an_agent_sampled_is_trained_in_its_contexts(folder: Path, dense: Path) -> None:
    """In the training processes and on a server, whose completions are the same."""
    agent = ["--agent", f"{AGENTS}:calls", *ROOM]
    server = RolloutServer(dense, folder / "agents.txt", agent).start()
    try:
        dataset = rows(folder / "calls.jsonl", number=[0, 1, 2, 3])
        run, dump = train(folder, dense, dataset, "calls", [*agent, "--external_plugins", str(REWARDS)])
        [first] = run.log[:1]
        assert first["rollout/k3_kl"] < 1e-9 and first["num_sequences"] == 2 and first["num_turns"] == 4
        for row in dump:
            [conversation] = row["earlier"]  # the call in another context came last
            assert sum(not sampled for sampled in conversation["sampled"]) > 0  # "And then?", and the result of a tool
            assert 1 <= len(row["completion_ids"]) <= 5 and row["rewards"][-1] == row["infos"]["total_reward"]
            assert [message["role"] for message in row["conversation"]] == ["system", "user", "assistant"]
        assert len({row["rewards"][-1] for row in dump}) > 1
        check_with_transformers(first, dense, folder / "calls-rollouts" / "rollout-000000.jsonl")
        server.wait()
        remote = ["--vllm_mode", "server", "--vllm_server_base_url", server.url, "--vllm_server_pass_dataset", "true",
                  "--external_plugins", str(REWARDS)]  # fmt: skip
        again, remote_dump = train(folder, dense, dataset, "remote", remote)
    finally:
        server.stop()
    names = ("prompt_ids", "completion_ids", "sampled", "conversation", "infos", "rewards")
    for row, expected in zip(remote_dump, dump, strict=True):
        assert {name: row[name] for name in names} == {name: expected[name] for name in names}
        assert row["earlier"][0]["completion_ids"] == expected["earlier"][0]["completion_ids"]
    assert again.log[0]["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-5)


IMPATIENT = ["--multi_turn_scheduler", "impatient", "--use_gym_env", "true", "--vllm_max_model_len", "2048"]
IMPATIENT_PLUGIN = str(PLUGINS / "impatient_agents.py")
LONG = ["--max_completion_length", "1900", "--num_generations", "2"]


def removed_turns(dump: list[Any], files: Iterable[Path]) -> list[str]:
    """Check what impatient agents were trained on. Return the turns that were removed, with steps, in each file."""
    for row in dump:
        assert row["infos"].keys() == {"total_reward", "num_turns"} and row["infos"]["num_turns"] == 2
        assert sum(row["sampled"]) == len(row["logprobs"]) == 2 * 20  # none of the call in between
    return [file.read_text() for file in files]


@pytest.mark.nightly
def test_a_call_that_is_given_up_is_removed_from_the_engine(folder: Path, dense: Path) -> None:
    """On all of its ranks before the same step, while others generate; completions and counts of drafts stay right."""
    dataset = rows(folder / "impatient.jsonl", gives_up=[True, False, True, False])
    dumps = []
    for size, drafts in ((1, ["--speculative_rollouts", "history"]), (2, [])):
        name = f"removed-{size}"
        flags = [*IMPATIENT, *LONG, *drafts, "--external_plugins", IMPATIENT_PLUGIN, str(REWARDS),
                 "--vllm_tensor_parallel_size", str(size)]  # fmt: skip
        run, dump = train(folder, dense, dataset, name, flags, {"REMOVED": str(folder / name)})
        first, second = removed_turns(dump, (folder / f"{name}.{rank}" for rank in range(2)))
        names = [line.split()[1:] for line in (first if size == 2 else first + second).splitlines()]
        assert sum(map(len, names)) == 4
        assert (first == second) == (size == 2)
        assert run.log[0].get("drafts/accepted", 0) >= 0  # the removed turns' tokens count, as their steps do
        dumps.append([row["completion_ids"] for row in dump])
    assert dumps[0] == dumps[1]


@pytest.mark.nightly
def test_a_call_that_is_given_up_is_removed_from_a_server(folder: Path, dense: Path) -> None:
    dataset, removed = rows(folder / "served.jsonl", gives_up=[True, False, True, False]), folder / "removed"
    flags = [*IMPATIENT, "--external_plugins", IMPATIENT_PLUGIN]
    server = RolloutServer(dense, folder / "impatient.txt", flags, {"REMOVED": str(removed)}).start()
    try:
        server.wait()
        remote = [*LONG, "--vllm_mode", "server", "--vllm_server_base_url", server.url,
                  "--vllm_server_pass_dataset", "true", "--external_plugins", str(REWARDS)]  # fmt: skip
        _, dump = train(folder, dense, dataset, "served", remote)
    finally:
        server.stop()
    [lines] = removed_turns(dump, [folder / "removed.server"])
    assert len(lines.splitlines()) == 4


@pytest.mark.nightly
def test_an_agent_that_fails_costs_its_rollout_alone(folder: Path, dense: Path) -> None:
    ways = ["raises", "hangs", "nonsense", "ends", "good", "good"]
    dataset = rows(folder / "ways.jsonl", way=ways)
    flags = [*LOCAL, "--multi_turn_scheduler", "failing", "--num_generations", "2", "--global_batch_size", "12",
             "--bad_reward", "drop"]  # fmt: skip
    run, dump = train(folder, dense, dataset, "ways", flags)
    [step] = run.log[:1]
    errors = {ways[int(row["messages"][0]["content"][:-1])]: row["infos"].get("agent_error") for row in dump}
    assert errors == {
        "raises": "LookupError: no such tool",
        "hangs": "it did not end within 25 seconds",
        "nonsense": "TypeError: it returned 'good', which is neither a number nor None",
        "ends": "SystemExit: 3",
        "good": None,
    }
    assert step["agents/failed"] == step["rewards/dropped"] == 8 and step["grad_norm"] > 0


@pytest.mark.nightly
def test_a_command_that_is_killed_costs_its_rollout_alone(folder: Path, dense: Path) -> None:
    ways = ["killed", "hangs", "nonsense", "good"]
    dataset = rows(folder / "commands.jsonl", way=ways)
    agent = f"timeout 15 {sys.executable} {PLUGINS / 'failing_command.py'}"
    flags = ["--agent", agent, *ROOM, "--external_plugins", str(REWARDS), "--num_generations", "2",
             "--global_batch_size", "8", "--bad_reward", "drop"]  # fmt: skip
    run, dump = train(folder, dense, dataset, "commands", flags)
    errors = {ways[int(row["messages"][0]["content"][:-1])]: row["infos"].get("agent_error") for row in dump}
    assert errors == {
        "killed": "RuntimeError: the command: exit code 137: ",
        "hangs": "RuntimeError: the command: exit code 124: ",
        "nonsense": "ValueError: the command's last line is 'good', which is not a number",
        "good": None,
    }
    assert all(1 <= len(row["completion_ids"]) <= 8 for row in dump)
    assert run.log[0]["agents/failed"] == run.log[0]["rewards/dropped"] == 6
