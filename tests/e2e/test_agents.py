"""Agents that call the policy as they would call OpenAI's: what they sampled is trained, and a failure costs one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_check import check_with_transformers
from tests.support.runs import PLUGINS, REWARDS, megatron_rlhf, read_json_lines

pytestmark = pytest.mark.e2e
FLAGS = ["--torch_dtype", "float32", "--fp16", "false", "--train_iters", "2", "--save_steps", "100", "--clip_grad",
         "100", "--max_tokens_per_micro_batch", "512", "--use_gym_env", "true",
         "--external_plugins", str(PLUGINS / "calling_agents.py"), str(REWARDS)]  # fmt: skip


def rows(path: Path, **columns: list[Any]) -> Path:
    """Write rows with these columns, one for each of their values."""
    content = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    questions = [{"messages": [{"role": "user", "content": f"{number}?"}], "letters": "abc"} for number in range(4)]
    path.write_text("".join(json.dumps(row | extra) + "\n" for row, extra in zip(questions, content, strict=True)))
    return path


def test_what_an_agent_sampled_is_trained_in_its_contexts(folder: Path, dense: Path) -> None:
    dataset, dumped = rows(folder / "calls.jsonl", number=[0, 1, 2, 3]), folder / "calls"
    flags = [*FLAGS, "--multi_turn_scheduler", "calls", "--rollout_dump", str(dumped)]
    run = megatron_rlhf(dense, dataset, folder / "calls-run", 2, flags)
    assert run.code == 0, run.output[-4000:]
    assert run.log[0]["rollout/k3_kl"] < 1e-9 and run.log[0]["num_sequences"] == 2 and run.log[0]["num_turns"] == 3
    for row in (dump := read_json_lines(dumped / "rollout-000000.jsonl")):
        [conversation] = row["earlier"]  # the call in another context came last
        assert sum(not sampled for sampled in conversation["sampled"]) > 0  # "And then?"
        assert 1 <= len(row["completion_ids"]) <= 5 and row["rewards"][-1] == row["infos"]["total_reward"]
        assert [message["role"] for message in row["conversation"]] == ["system", "user", "assistant"]
    assert len({row["rewards"][-1] for row in dump}) > 1
    check_with_transformers(run.log[0], dense, dumped / "rollout-000000.jsonl")


def test_an_agent_that_fails_costs_its_rollout_alone(folder: Path, dense: Path) -> None:
    dataset, dumped = rows(folder / "ways.jsonl", way=["raises", "hangs", "nonsense", "ends"]), folder / "ways"
    flags = [*FLAGS, "--multi_turn_scheduler", "failing", "--rollout_dump", str(dumped), "--train_iters", "1",
             "--num_generations", "2", "--global_batch_size", "8"]  # fmt: skip
    run = megatron_rlhf(dense, dataset, folder / "ways-run", 2, [*flags, "--bad_reward", "drop"])
    print(run.output[-3000:])
