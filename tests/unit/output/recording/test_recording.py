"""Recorded rollouts: they are read back bit for bit, and a file that does not fit is refused by file, line and flag."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from swift_megatron_grpo.output.disk.files import checksum
from swift_megatron_grpo.output.disk.full_disk import NoSpace
from swift_megatron_grpo.output.recording.folder import (
    RolloutDump,
    Settings,
    check_dump,
    check_replay,
    check_rollouts,
    recorded_rollouts,
)
from swift_megatron_grpo.output.recording.reading import EarlierRollouts, RolloutReplay
from swift_megatron_grpo.output.recording.rows import BadRow, Limits, sealed
from swift_megatron_grpo.types import Graded, Prompt, Rollout, TokenSequence
from tests.unit.output.disk.small_files import file_size_limit

SETTINGS = Settings(num_generations=2, generation_batch_size=4, temperature=0.7, reward_funcs=("Letters", "Length"))
LIMITS = Limits(vocabulary=300, reward_functions=2)
PROMPTS = [Prompt(f"0-{i}", {"messages": [{"role": "user", "content": f"{i}\u2028é"}], "solution": i}) for i in (0, 1)]


def completions(seed: int = 0) -> list[Graded]:
    rng = random.Random(seed)
    completions = []
    for prompt in [prompt for prompt in PROMPTS for _ in range(2)]:
        tokens = [rng.randrange(300) for _ in range(rng.randint(1, 9))]
        rollout = Rollout(prompt, [1, 2], tokens, [rng.uniform(-30, 0) for _ in tokens], "é\n\u2028\x85x", "stop", 3)
        completions.append(Graded(rollout, [rng.gauss(0, 1), None], reward=0.5, advantage=0.1))
    return completions


def seal_again(path: Path) -> None:
    """Give the lines of an edited file the checksums of their new content."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    path.write_text("".join(sealed({name: value for name, value in row.items() if name != "crc32"}) for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with rollouts 0 to 2; rollout 1 has two draws."""
    dump = RolloutDump(tmp_path / "dump", SETTINGS, first=0, writes_here=True)
    for rollout in range(3):
        dump.write(rollout, 0, completions(rollout))
    dump.write(1, 1, completions(9))
    return tmp_path / "dump"


def test_rollouts_are_read_back_bit_for_bit(folder: Path) -> None:
    for draw, seed in ((0, 1), (1, 9)):
        rollouts, rewards = RolloutReplay(folder, LIMITS).take(1, draw, PROMPTS, 2)
        assert rollouts == [graded.rollout for graded in completions(seed)]
        assert rewards == [graded.rewards for graded in completions(seed)]


def several_sequences() -> list[Graded]:
    earlier = (TokenSequence([1, 2], [3, 4], [-1.0], [True, False]), TokenSequence([9], [8], None, None, [(5, 1)]))
    return [
        replace(graded, rollout=replace(graded.rollout, messages=[{"role": "user"}], earlier=earlier))
        for graded in completions()
    ]


def test_earlier_sequences_are_read_back_bit_for_bit(folder: Path) -> None:
    RolloutDump(folder, SETTINGS, first=0, writes_here=True).write(0, 0, several_sequences())
    rollouts, _ = RolloutReplay(folder, LIMITS).take(0, 0, PROMPTS, 2)
    assert rollouts == [graded.rollout for graded in several_sequences()]


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("completion_ids", [3, 300], r"completion_ids\[1\] is 300, but the model has the tokens 0 to 299"),
        ("logprobs", [-1.0, -2.0], "logprobs has 2 values for 1 sampled tokens"),
        ("sampled", [True], "sampled has 1 values for 2 tokens"),
        ("prompt_ids", [], "prompt_ids is .*, which has no token"),
        ("spans", [[5, 2]], r"and they are not of 1 sampled tokens"),
        ("spans", [5], r"spans\[0\] is 5, which is not a version and a number of tokens"),
        (None, "no sequence", r"earlier\[0\] is 'no sequence', which is not a sequence"),
    ],
)
def test_an_earlier_sequence_that_no_run_writes_is_refused(
    folder: Path, field: str | None, value: object, problem: str
) -> None:
    RolloutDump(folder, SETTINGS, first=0, writes_here=True).write(0, 0, several_sequences())
    path = folder / "rollout-000000.jsonl"
    row, *others = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    if field is None:
        row["earlier"][0] = value
    else:
        row["earlier"][0][field] = value
    path.write_text("".join(json.dumps(each) + "\n" for each in (row, *others)))
    seal_again(path)
    with pytest.raises(BadRow, match=problem):
        RolloutReplay(folder, LIMITS).take(0, 0, PROMPTS, 2)


def with_spans(spans: list[tuple[int, int]] | None) -> list[Graded]:
    """Return completions of four tokens."""
    return [
        replace(one, rollout=replace(one.rollout, completion_ids=[1] * 4, logprobs=[-1.0] * 4, spans=spans))
        for one in completions()
    ]


def test_spans_are_read_back_and_no_others_are_written(folder: Path) -> None:
    dump = RolloutDump(folder, SETTINGS, first=0, writes_here=True)
    dump.write(0, 0, with_spans([(3, 1), (5, 3)]))
    rollouts, _ = RolloutReplay(folder, LIMITS).take(0, 0, PROMPTS, 2)
    assert [rollout.spans for rollout in rollouts] == [[(3, 1), (5, 3)]] * 4
    dump.write(0, 0, with_spans(None))
    assert b"spans" not in (folder / "rollout-000000.jsonl").read_bytes()


@pytest.mark.parametrize(
    "spans", [[], [[3, 4.0]], [[4, 4]], [[3, 1], [3, 3]], [[3, 1], [5, 2]], [[3, 5], [5, -1]], [3, 4], {"3": 4}, [[3]]]
)
def test_spans_that_no_run_has_written_are_refused(folder: Path, spans: Any) -> None:
    dump = RolloutDump(folder, SETTINGS, first=0, writes_here=True)
    dump.write(0, 0, with_spans([(3, 1), (5, 3)]))
    path = folder / "rollout-000000.jsonl"
    rows = [json.loads(line) | {"spans": spans} for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    path.write_text("".join(sealed({name: row[name] for name in row if name != "crc32"}) for row in rows))
    with pytest.raises(Exception, match="spans"):
        RolloutReplay(folder, LIMITS).take(0, 0, PROMPTS, 2)


def test_rewards_of_nan_and_infinity_are_read_back(folder: Path) -> None:
    dump = RolloutDump(folder, SETTINGS, first=0, writes_here=True)
    completions_with_nan = [replace(graded, rewards=[math.inf, math.nan]) for graded in completions()]
    dump.write(0, 0, completions_with_nan)
    _, rewards = RolloutReplay(folder, LIMITS).take(0, 0, PROMPTS, 2)
    assert all(row[0] == math.inf and math.isnan(row[1] or 0) for row in rewards)


def test_pandas_reads_a_file_with_one_call(folder: Path) -> None:
    frame = pandas.read_json(folder / "rollout-000002.jsonl", lines=True, precise_float=True)
    expected = completions(2)
    assert frame.logprobs.tolist() == [graded.rollout.logprobs for graded in expected]
    assert frame.rewards.str[0].tolist() == [graded.rewards[0] for graded in expected]


def test_a_resumed_run_deletes_rollouts_after_its_checkpoint(folder: Path) -> None:
    RolloutDump(folder, SETTINGS, first=1, writes_here=True)
    assert [path.name for path in sorted(folder.glob("*.jsonl"))] == ["rollout-000000.jsonl"]


def test_a_rank_that_does_not_write_creates_no_folder(tmp_path: Path) -> None:
    RolloutDump(tmp_path / "none", SETTINGS, first=0, writes_here=False).write(0, 0, completions())
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda text: text.replace('"text"', '"words"', 1), "line 1: the field 'text' is missing"),
        (lambda text: text.split("\n", 1)[1], "has 3 completions, but this run needs 4"),
        (lambda text: text.replace("0-1", "0-7", 1), "line 3: it completes prompt 0-7"),
        (lambda text: text.replace('"content": "1', '"content": "2', 1), "use the same --dataset, --data_seed"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(folder: Path, change: object, complaint: str) -> None:
    path = folder / "rollout-000000.jsonl"
    path.write_text(change(path.read_text()))  # type: ignore[operator]
    seal_again(path)
    with pytest.raises(BadRow, match=r"rollout-000000\.jsonl") as refused:
        RolloutReplay(folder, LIMITS).take(0, 0, PROMPTS, 2)
    assert complaint in str(refused.value)


def test_a_draw_that_was_not_dumped_is_reported(folder: Path) -> None:
    with pytest.raises(BadRow, match=r"rollout-000002-draw-1\.jsonl does not exist"):
        RolloutReplay(folder, LIMITS).take(2, 1, PROMPTS, 2)


def test_a_replay_with_other_settings_is_refused(folder: Path) -> None:
    check_replay(folder, SETTINGS)
    for change, advice in (
        ({"num_generations": 4}, "use --num_generations 2"),
        ({"generation_batch_size": 8}, "use --generation_batch_size 4"),
        ({"temperature": 1.0}, "use --temperature 0.7"),
        ({"reward_funcs": ("Letters",)}, "use the same --reward_funcs"),
    ):
        with pytest.raises(ValueError, match=advice):
            check_replay(folder, replace(SETTINGS, **change))


def test_a_folder_that_is_not_a_dump_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="the folder does not exist; give one that --rollout_dump has written"):
        check_replay(folder / "no", SETTINGS)
    (folder / "settings.json").unlink()
    with pytest.raises(ValueError, match=r"the folder has no settings\.json"):
        check_replay(folder, SETTINGS)


def test_another_format_is_refused(folder: Path) -> None:
    path = folder / "settings.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 7}))
    with pytest.raises(ValueError, match="is in format 7, but this version reads format 2"):
        check_replay(folder, SETTINGS)


def test_a_missing_rollout_is_reported_before_training(folder: Path) -> None:
    check_rollouts(folder, 0, 3, steps_per_rollout=2)
    with pytest.raises(ValueError, match=r"no rollout 3 .* it has 0 to 2; use --train_iters 6 or less"):
        check_rollouts(folder, 0, 4, steps_per_rollout=2)
    (folder / "rollout-000001.jsonl").unlink()
    with pytest.raises(ValueError, match=r"no rollout 1 .* it has 0, 2; use --train_iters 2 or less"):
        check_rollouts(folder, 0, 3, steps_per_rollout=2)


def test_a_damaged_file_is_reported_before_training_by_its_reader(folder: Path) -> None:
    path = folder / "rollout-000001.jsonl"
    path.write_text(path.read_text()[:-1])
    with pytest.raises(ValueError, match=r"rollout-000001\.jsonl, line 4: the line is cut off"):
        check_rollouts(folder, 0, 3, steps_per_rollout=1)
    refusals = 0
    for rank in range(3):
        try:
            check_rollouts(folder, 0, 3, steps_per_rollout=1, share=(rank, 3))
        except ValueError:
            refusals += 1
    assert refusals == 1


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("completion_ids", [3, 300], r"completion_ids\[1\] is 300, but the model has the tokens 0 to 299"),
        ("completion_ids", [-1], r"completion_ids\[0\] is -1"),
        ("prompt_ids", [True], r"prompt_ids\[0\] is True"),
        ("completion_ids", 5, "completion_ids is 5, which is not a list"),
        ("logprobs", [-0.5] * 40, "logprobs has 40 values for"),
        ("logprobs", "x", "logprobs is 'x', which is not a list"),
        ("prompt_ids", [], "prompt_ids is .., which has no token"),
        ("completion_ids", [], "completion_ids is .., which has no token"),
        ("sampled", [True] * 40, "sampled has 40 values for"),
        ("sampled", [1], r"sampled\[0\] is 1, which is not a flag"),
        ("rewards", [1.0], "rewards has 1 values for 2 reward functions"),
        ("rewards", ["a", None], r"rewards\[0\] is 'a', which is neither a number nor null"),
        ("weights_version", -3, "weights_version is -3"),
        ("text", None, "text is None, which is not a str"),
        ("infos", [], "infos is .., which is not a dict"),
        ("messages", [], "messages is .., which is not a list of messages"),
        ("conversation", ["a"], r"conversation\[0\] is 'a', which is not a message"),
    ],
)
def test_a_value_that_no_run_writes_is_refused_by_file_and_line(
    folder: Path, field: str, value: object, complaint: str
) -> None:
    path = folder / "rollout-000000.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[2] = json.dumps({**json.loads(lines[2]), field: value}) + "\n"
    path.write_text("".join(lines))
    seal_again(path)
    with pytest.raises(BadRow, match=rf"rollout-000000\.jsonl, line 3: {complaint}"):
        RolloutReplay(folder, LIMITS).take(0, 0, PROMPTS, 2)


def test_other_tokens_of_a_prompt_within_its_group_are_refused(folder: Path) -> None:
    path = folder / "rollout-000000.jsonl"
    path.write_text(path.read_text().replace('"prompt_ids": [1, 2]', '"prompt_ids": [1, 3]', 1))
    seal_again(path)
    with pytest.raises(BadRow, match=r"line 2: prompt_ids are not those of the first completion of prompt 0-0"):
        RolloutReplay(folder, LIMITS).take(0, 0, PROMPTS, 2)
    earlier = EarlierRollouts(folder, LIMITS).take(0, 0, PROMPTS, 2, lambda version: True)
    assert sorted(earlier) == [2, 3]


@pytest.mark.parametrize("value", ["[" * 10**5, "9" * 5000])
def test_a_line_that_json_cannot_read_is_refused_in_spite_of_its_checksum(folder: Path, value: str) -> None:
    path = folder / "rollout-000000.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    content = f'{{"prompt_id": {value}'
    lines[1] = f'{content}, "crc32": "{checksum(content.encode())}"}}\n'
    path.write_text("".join(lines))
    with pytest.raises(BadRow, match=r"rollout-000000\.jsonl, line 2: it cannot be read: "):
        RolloutReplay(folder, LIMITS).take(0, 0, PROMPTS, 2)
    assert sorted(EarlierRollouts(folder, LIMITS).take(0, 0, PROMPTS, 2, lambda version: True)) == [2, 3]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 5.0])
def test_log_probs_that_are_not_finite_or_above_0_are_refused(folder: Path, value: float) -> None:
    dump = RolloutDump(folder, SETTINGS, first=0, writes_here=True)
    good = completions()
    logprobs = [*(good[1].rollout.logprobs or [])[:-1], value]
    good[1] = replace(good[1], rollout=replace(good[1].rollout, logprobs=logprobs))
    dump.write(0, 0, good)
    with pytest.raises(BadRow, match=rf"line 2: logprobs\[{len(logprobs) - 1}\] is .*, which is not a finite"):
        RolloutReplay(folder, LIMITS).take(0, 0, PROMPTS, 2)


def test_a_full_disk_is_named_and_leaves_no_file(folder: Path) -> None:
    """The limit on the size of a file stands in for a full disk: it needs no rights, and the same error appears."""
    dump = RolloutDump(folder, SETTINGS, first=3, writes_here=True)
    with file_size_limit(1000), pytest.raises(NoSpace, match=r"no space: --rollout_dump cannot write .*000003\.jsonl"):
        dump.write(3, 0, completions() * 9)
    assert sorted(path.name for path in folder.iterdir() if "3" in path.name) == []
    assert not list(folder.glob("*.part"))


def test_a_folder_with_rollouts_of_another_run_is_refused(folder: Path, tmp_path: Path) -> None:
    check_dump(tmp_path / "new", SETTINGS, resumes=False)
    check_dump(folder, SETTINGS, resumes=True)
    with pytest.raises(ValueError, match="holds rollouts of another run"):
        check_dump(folder, SETTINGS, resumes=False)
    with pytest.raises(ValueError, match="use --num_generations 2 or dump to another folder"):
        check_dump(folder, replace(SETTINGS, num_generations=4), resumes=True)
    assert recorded_rollouts(tmp_path / "new") == []


def test_experts_are_read_back_bit_for_bit_and_written_only_if_any_exist(tmp_path: Path) -> None:
    graded = completions()
    rows = [None if i == 1 else np.full((2, 3, 2), i, np.uint8) for i in range(len(graded))]
    graded = [
        replace(g, rollout=replace(g.rollout, routed_experts=experts)) for g, experts in zip(graded, rows, strict=True)
    ]
    RolloutDump(tmp_path, SETTINGS, first=0, writes_here=True).write(0, 0, graded)
    lines = [json.loads(line) for line in (tmp_path / "rollout-000000.jsonl").read_text().split("\n")[:-1]]
    assert [("routed_experts" in line) for line in lines] == [True, False, True, True]
    read, _ = RolloutReplay(tmp_path, LIMITS).take(0, 0, PROMPTS, 2)
    assert read[1].routed_experts is None
    assert all(np.array_equal(read[i].routed_experts, rows[i]) for i in (0, 2, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "problem"), [("damaged", "routed_experts cannot be read"), ("long", "rows for .* the last one never ran")]
)
def test_experts_that_no_engine_has_reported_are_refused_by_line(tmp_path: Path, rows: str, problem: str) -> None:
    graded = completions()
    tokens = len(graded[0].rollout.prompt_ids + graded[0].rollout.completion_ids)
    experts = np.zeros((tokens if rows == "long" else tokens - 1, 3, 2), np.uint8)
    graded[0] = replace(graded[0], rollout=replace(graded[0].rollout, routed_experts=experts))
    RolloutDump(tmp_path, SETTINGS, first=0, writes_here=True).write(0, 0, graded)
    if rows == "damaged":
        path = tmp_path / "rollout-000000.jsonl"
        path.write_text(path.read_text().replace('"type": "uint8"', '"type": "text"'))
        seal_again(path)
    with pytest.raises(BadRow, match=f"line 1: .*{problem}"):
        RolloutReplay(tmp_path, LIMITS).take(0, 0, PROMPTS, 2)
