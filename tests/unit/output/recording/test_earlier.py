"""A run continues what an earlier one has dumped: whole groups are used, and what is missing or damaged is left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from swift_megatron_grpo.output.disk.files import checksum
from swift_megatron_grpo.output.recording.folder import RolloutDump, check_dump
from swift_megatron_grpo.output.recording.reading import EarlierRollouts, Recorded, can_be_used, recorded_texts
from tests.unit.output.recording.test_recording import LIMITS, PROMPTS, SETTINGS, completions

FLAGS = {"lr": "0.1", "top_p": "1.0"}


@pytest.fixture
def dump(tmp_path: Path) -> RolloutDump:
    return RolloutDump(tmp_path, SETTINGS, first=0, writes_here=True, flags=FLAGS)


def take(folder: Path, rollout: int, version: int = 3, draw: int = 0) -> Recorded:
    return EarlierRollouts(folder, LIMITS).take(rollout, draw, PROMPTS, 2, lambda used: used == version)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "settings.json")


def test_a_complete_rollout_is_used_with_its_rewards(tmp_path: Path, dump: RolloutDump) -> None:
    dump.write(4, 0, completions(4))
    dump.write(5, 0, completions(5))
    assert take(tmp_path, 4) == {i: (g.rollout, g.rewards) for i, g in enumerate(completions(4))}
    assert files(tmp_path) == ["rollout-000004.jsonl", "rollout-000005.jsonl"]
    assert take(tmp_path, 6) == {}


def test_groups_are_appended_when_graded(tmp_path: Path, dump: RolloutDump) -> None:
    """The file of the rollout replaces them."""
    graded = completions()
    dump.append(4, 0, graded[2:])  # the second prompt finished first
    assert take(tmp_path, 4) == {index: (graded[index].rollout, graded[index].rewards) for index in (2, 3)}
    dump.append(4, 0, graded[:2])
    assert len(take(tmp_path, 4)) == 4
    dump.write(4, 0, graded)
    assert files(tmp_path) == ["rollout-000004.jsonl"]


def test_a_torn_or_damaged_line_costs_its_group_alone(tmp_path: Path, dump: RolloutDump) -> None:
    """Later groups can still be appended."""
    graded, path = completions(), tmp_path / "rollout-000004.partial"
    dump.append(4, 0, graded)
    path.write_bytes(path.read_bytes()[:-9])
    assert sorted(take(tmp_path, 4)) == [0, 1]
    dump.append(4, 0, graded[2:])
    assert sorted(take(tmp_path, 4)) == [0, 1, 2, 3]
    dump.write(4, 0, graded)
    whole = tmp_path / "rollout-000004.jsonl"
    whole.write_bytes(whole.read_bytes().replace(b'"stop"', b'"halt"', 1))
    assert sorted(take(tmp_path, 4)) == [2, 3] and files(tmp_path) == ["rollout-000004.partial"]


def test_completions_of_other_weights_or_prompts_are_not_used(tmp_path: Path, dump: RolloutDump) -> None:
    dump.write(4, 0, completions())
    assert EarlierRollouts(tmp_path, LIMITS).take(4, 0, PROMPTS[:1] * 2, 2, lambda _: True).keys() == {0, 1, 2, 3}
    dump.write(4, 0, completions())
    assert take(tmp_path, 4, version=2) == {}


def test_after_the_first_rollout_that_is_not_complete_nothing_is_left(tmp_path: Path, dump: RolloutDump) -> None:
    """Weights that were trained on other completions generated the rest."""
    for rollout in (3, 4, 5):
        dump.write(rollout, 0, completions(rollout))
    dump.write(4, 1, completions(9))
    dump.append(6, 0, completions()[:2])
    (tmp_path / "rollout-000004.jsonl").unlink()
    dump.append(4, 0, completions(4)[:2])
    assert sorted(take(tmp_path, 4)) == [0, 1]
    assert files(tmp_path) == ["rollout-000003.jsonl", "rollout-000004.partial"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({**FLAGS, "lr": "0.2"}, "--lr was 0.1 and is 0.2"),
        ({**FLAGS, "beta": "1"}, "--beta was None and is 1"),
        ({}, "does not have the flags"),
    ],
)
def test_a_run_with_other_flags_generates_again(
    tmp_path: Path, dump: RolloutDump, caplog: pytest.LogCaptureFixture, flags: Mapping[str, str], reason: str
) -> None:
    dump.write(0, 0, completions())
    assert can_be_used(tmp_path, FLAGS) and not caplog.text
    assert not can_be_used(tmp_path, flags) and reason in caplog.text
    check_dump(tmp_path, SETTINGS, resumes=False, flags=FLAGS)
    with pytest.raises(ValueError, match="holds rollouts of another run"):
        check_dump(tmp_path, SETTINGS, resumes=False, flags=flags)


@pytest.mark.parametrize("edit", ["[" * 10**5, "null", '{"format": 2, "crc32": 5}'])
def test_settings_that_no_run_writes_are_not_used(tmp_path: Path, dump: RolloutDump, edit: str) -> None:
    (tmp_path / "settings.json").write_text(edit)
    assert not can_be_used(tmp_path, FLAGS)


def test_flags_of_another_type_are_not_used(tmp_path: Path, dump: RolloutDump) -> None:
    path = tmp_path / "settings.json"
    content = {**json.loads(path.read_text()), "flags": ["lr"]}
    del content["crc32"]
    path.write_text(json.dumps({**content, "crc32": checksum(json.dumps(content).encode())}))
    assert not can_be_used(tmp_path, FLAGS)


def test_a_folder_that_is_not_a_dump_is_not_used(tmp_path: Path) -> None:
    assert not can_be_used(tmp_path / "none", FLAGS)


def test_later_rollouts_stay_only_for_a_run_that_uses_them(tmp_path: Path, dump: RolloutDump) -> None:
    dump.write(3, 0, completions())
    dump.append(4, 0, completions()[:2])
    RolloutDump(tmp_path, SETTINGS, first=3, writes_here=True, flags=FLAGS, keeps_later=True)
    assert files(tmp_path) == ["rollout-000003.jsonl", "rollout-000004.partial"]
    RolloutDump(tmp_path, SETTINGS, first=4, writes_here=True, flags=FLAGS)
    assert files(tmp_path) == ["rollout-000003.jsonl"]


def test_drafts_come_from_the_newest_intact_files_before_a_rollout(tmp_path: Path, dump: RolloutDump) -> None:
    def texts(before: int = 6, most_bytes: int = 10**6, vocabulary: int = 999) -> list[tuple[list[int], list[int]]]:
        return [(list(p), list(c)) for p, c in recorded_texts(tmp_path, before, most_bytes, vocabulary)]

    for rollout, draw in ((3, 0), (4, 0), (4, 1), (5, 0)):
        dump.write(rollout, draw, completions(rollout))
    expected = [(list(g.rollout.prompt_ids), list(g.rollout.completion_ids)) for g in completions(4)]
    size = (tmp_path / "rollout-000005.jsonl").stat().st_size
    assert texts(before=5)[-4:] == expected and len(texts()) == 16 and len(texts(before=4)) == 4
    assert len(texts(most_bytes=size)) == 4 and texts(most_bytes=size - 1) == []
    assert texts(vocabulary=2) == []  # another model's: its tokens would be no draft but a crash
    damaged = tmp_path / "rollout-000004-draw-1.jsonl"
    damaged.write_bytes(damaged.read_bytes().replace(b'"stop"', b'"halt"', 1))
    assert len(texts()) == 12
