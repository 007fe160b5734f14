"""The tables of `simulate-drafts`, and dumps that are damaged or hold nonsense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.cli.main import main
from swift_megatron_grpo.output.recording.rows import sealed
from swift_megatron_grpo.output.report.contents import contents, load
from swift_megatron_grpo.output.report.simulated_drafts import FILE, saved_steps

FIRST, SECOND = "rollout-000000.jsonl", "rollout-000001.jsonl"
ROW: dict[str, Any] = {"prompt_id": "0-0", "prompt_ids": [1, 2], "completion_ids": list(range(10, 30)),
                       "logprobs": [-0.5] * 20, "sampled": None, "conversation": None}  # fmt: skip


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    folder = tmp_path / "dump"
    folder.mkdir()
    for name in (FIRST, SECOND):
        write(folder / name, ROW, {**ROW, "completion_ids": list(range(50, 60)), "logprobs": [-0.25] * 10})
    return folder


def write(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(map(sealed, rows)))


def test_the_tables_count_steps_by_depth_and_by_running(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate-drafts", str(dump), "--rollouts", "1", "--depths", "4"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == [
        f"{dump}: rollout 1, 2 completions of 1 prompts, mean log-prob -0.42",
        "drafts also come from 2 completions of these prompts in earlier rollouts",
    ]
    assert [line.split() for line in printed[4:6]] == [
        ["0", "0.00", "-", "1.00", "20", "0%"],
        ["4", "3.00", "100%", "3.75", "5", "75%"],  # steps of 1, 5, 5, 5 and 4 tokens, and of 1, 5 and 4
    ]
    assert printed[-1].split() == ["1", "to", "8", "20", "3.75"]


def test_the_file_of_numbers_has_every_step(dump: Path, tmp_path: Path) -> None:
    target = tmp_path / "numbers.json"
    assert main(["simulate-drafts", str(dump), "--running", "1", "--output_file", str(target)]) == 0
    rows = json.loads(target.read_text())
    assert {row["depth"] for row in rows} == {0, 1, 2, 4, 8}
    assert {row["running"] for row in rows} == {1}
    assert [row["tokens"] for row in rows] == [60] * 5


def test_the_output_dir_of_a_run_leads_to_its_dump_and_gets_the_numbers(dump: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "args.json").write_text(json.dumps({"rollout_dump": str(dump)}))
    assert saved_steps(run) is None
    assert main(["simulate-drafts", str(run), "--rollouts", "1", "--depths", "1", "4"]) == 0
    assert saved_steps(run) == "45% with 1, 75% with 4"  # 11 and 5 of 20 steps
    [shown] = contents(load([run]), "now")["runs"]
    assert ("decode steps that drafts would save", "45% with 1, 75% with 4") in shown["facts"]
    assert not (dump / FILE).exists()


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", "[1]", '[{"depth": 1, "steps": 3}]', '[{"depth": 0, "steps": 0}, {"depth": 1, "steps": 3}]',
     '[{"depth": 0, "steps": 4}, {"depth": "<b>", "steps": 3}]',
     '[{"depth": 0, "steps": 4}, {"depth": 1, "steps": NaN}]',
     '[{"depth": 0, "steps": 4}, {"depth": 1, "steps": true}]', "[" * 10**5, "\x00"],
)  # fmt: skip
def test_a_report_leaves_out_numbers_that_are_none(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    assert saved_steps(tmp_path) is None


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["simulate-drafts", *words]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    return printed.err


@pytest.mark.parametrize("settings", [None, "{", "[]", '{"rollout_dump": null}', '{"rollout_dump": 3}', "[" * 10**5])
def test_a_folder_without_rollouts_is_refused(
    tmp_path: Path, settings: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if settings is not None:
        (tmp_path / "args.json").write_text(settings)
    assert f"{tmp_path} has no rollouts; give the folder" in refusal(capsys, str(tmp_path))
    assert "has no rollouts" in refusal(capsys, str(tmp_path / "missing"))


def test_a_file_that_was_cut_at_any_place_is_refused(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (dump / FIRST).read_bytes()
    for size in (1, 40, len(whole) // 2, len(whole) - 1):
        (dump / FIRST).write_bytes(whole[:size])
        assert f"{dump / FIRST}, line " in refusal(capsys, str(dump))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"completion_ids": []}, "completion_ids is [], which has no token"),
        ({"prompt_ids": []}, "prompt_ids is [], which has no token"),
        ({"completion_ids": [3, -1]}, "completion_ids[1] is -1, which is not a token"),
        ({"completion_ids": [True]}, "completion_ids[0] is True"),
        ({"completion_ids": [2.0]}, "completion_ids[0] is 2.0"),
        ({"completion_ids": [10**30]}, "which is not a token"),
        ({"completion_ids": {"0": 1}}, "which is not a list of tokens"),
        ({"completion_ids": "123"}, "which is not a list of tokens"),
        ({"prompt_ids": [[1]]}, "prompt_ids[0] is [1]"),
        ({"sampled": [True]}, "sampled has 1 values for 20 tokens"),
        ({"sampled": [1] * 20}, "which is not a flag"),
        ({"logprobs": [0.0]}, "logprobs has 1 values for 20 sampled tokens"),
        ({"logprobs": [float("nan")] * 20}, "which is not a finite number up to 0"),
    ],
)
def test_a_row_with_other_shapes_is_refused_by_field(
    dump: Path, change: dict[str, Any], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(dump / SECOND, ROW, {**ROW, **change})
    error = refusal(capsys, str(dump))
    assert error.startswith(f"simulate-drafts: {dump / SECOND}, line 2: ")
    assert problem in error


@pytest.mark.parametrize("field", ["prompt_ids", "completion_ids", "sampled", "logprobs", "conversation"])
def test_a_row_without_a_field_is_refused(dump: Path, field: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(dump / FIRST, {name: value for name, value in ROW.items() if name != field})
    assert f"line 1: the field '{field}' is missing" in refusal(capsys, str(dump))


def test_a_dump_without_logprobs_and_with_empty_turns_is_replayed(
    dump: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = {**ROW, "completion_ids": [], "logprobs": None, "conversation": [{}]}
    never = {**ROW, "sampled": [False] * 20, "logprobs": None, "conversation": [{}]}
    write(dump / SECOND, nothing, never, {**ROW, "logprobs": None})
    assert main(["simulate-drafts", str(dump), "--rollouts", "1"]) == 0
    assert "mean log-prob unknown" in capsys.readouterr().out


def test_a_dump_with_nothing_to_decode_is_refused(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(dump / SECOND, {**ROW, "completion_ids": [], "logprobs": None, "conversation": [{}]})
    assert "nothing was sampled in rollout 1" in refusal(capsys, str(dump), "--rollouts", "1")


@pytest.mark.parametrize("flag", ["--depths", "--rollouts", "--running"])
def test_sizes_below_1_are_a_wrong_command_line(flag: str, dump: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate-drafts", str(dump), flag, "0"])
    assert ended.value.code == 2
