"""The log of completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.loop.completion_log import CompletionLog
from swift_megatron_grpo.output.disk.full_disk import NoSpace
from swift_megatron_grpo.settings.recording import CompletionLogging
from swift_megatron_grpo.types import Graded, Prompt, Rollout, TokenSequence
from tests.unit.output.disk.small_files import file_size_limit


def completion_log(folder: Path) -> CompletionLog:
    def write(rows: list[dict[str, Any]]) -> None:
        with (folder / "completions.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    config = CompletionLogging(
        log_completions=True, output_dir=str(folder), report_to=[], wandb_log_unique_prompts=False
    )
    return CompletionLog(config, ["letters"], str, write, writes_here=True, rollout=3)


def completions(count: int) -> list[Graded]:
    rollout = Rollout(Prompt("0-0", {"messages": []}), [1], [2, 3], None, "text", "stop", 5)
    return [Graded(rollout, [0.5], 0.5, 0.1)] * count


def test_a_rollout_is_logged_with_its_number(tmp_path: Path) -> None:
    log = completion_log(tmp_path)
    log.append(completions(2))
    log.append(completions(1))
    rows = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert [row["rollout"] for row in rows] == [3, 3, 4]
    assert rows[0] == {
        "rollout": 3, "gen_step": 5, "prompt": "[1]", "completion": "text", "tokens": 2, "truncated": False,
        "letters": 0.5, "total_reward": 0.5, "advantages": 0.1,
    }  # fmt: skip


def test_a_conversation_is_logged_with_all_turns(tmp_path: Path) -> None:
    turns = Rollout(Prompt("0-0", {"messages": []}), [1], [2, 3, 4], None, "last turn", "stop", 5, messages=[])
    completion_log(tmp_path).append([Graded(turns, [0.5], 0.5, 0.1)])
    assert json.loads((tmp_path / "completions.jsonl").read_text())["completion"] == "[2, 3, 4]"


def test_sequences_are_logged_from_where_they_leave_another(tmp_path: Path) -> None:
    earlier = (TokenSequence([1], [2, 3], None), TokenSequence([1, 7], [8], None))
    tree = Rollout(
        Prompt("0-0", {"messages": []}), [1, 2, 6], [5], None, "last", "stop", 5, messages=[], earlier=earlier
    )
    completion_log(tmp_path).append([Graded(tree, [0.5], 0.5, 0.1)])
    row = json.loads((tmp_path / "completions.jsonl").read_text())
    assert row["prompt"] == "[1]" and row["tokens"] == 4
    assert row["completion"] == (
        "[2, 3]\n--- sequence 2 of 3, after 1 tokens of sequence 1 ---\n[7, 8]"
        "\n--- sequence 3 of 3, after 2 tokens of sequence 1 ---\n[6, 5]"
    )


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    expected = rf"no space: --log_completions cannot write {tmp_path}/completions\.jsonl: .* are free there"
    with file_size_limit(500), pytest.raises(NoSpace, match=expected):
        completion_log(tmp_path).append(completions(50))
