"""A checkpoint between two steps on one rollout holds the rollout, which a resumed run continues or generates again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swift_megatron_grpo.output.recording.rows import BadRow, no_images
from swift_megatron_grpo.output.recording.unfinished import FILE, UnfinishedRollout, read_unfinished, save_unfinished
from swift_megatron_grpo.types import Prompt
from tests.unit.output.recording.test_recording import LIMITS, PROMPTS, completions

SETTINGS = {"global_batch_size": 2, "temperature": 0.7}
OLD = [None, [-0.1, -1 / 3], [-2.0], None]
ROLLOUT = UnfinishedRollout(7, SETTINGS, completions(), OLD, from_engine=False)


def find(prompt_id: str) -> Prompt:
    return {prompt.prompt_id: prompt for prompt in PROMPTS}[prompt_id]


def read(folder: Path, number: int = 7, settings: dict[str, float] = SETTINGS) -> UnfinishedRollout | None:
    return read_unfinished(folder, number, settings, find, LIMITS, no_images)


def test_a_rollout_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    dropped = [replace(ROLLOUT.graded[0], reward=None), *ROLLOUT.graded[1:]]
    of_tokens = replace(ROLLOUT, teacher_ratios=OLD, token_advantages=[[0.1], None, [-1 / 3], []])
    for rollout in (ROLLOUT, replace(ROLLOUT, graded=dropped, from_engine=True), of_tokens):
        save_unfinished(tmp_path, rollout, no_images)
        assert read(tmp_path) == rollout


def test_a_checkpoint_between_rollouts_has_no_file_and_removes_an_old_one(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    save_unfinished(tmp_path, ROLLOUT, no_images)
    save_unfinished(tmp_path, None, no_images)
    assert read(tmp_path) is None and not (tmp_path / FILE).exists()


def test_a_run_that_cannot_continue_the_rollout_is_refused_with_the_reason(tmp_path: Path) -> None:
    save_unfinished(tmp_path, ROLLOUT, no_images)
    with pytest.raises(BadRow, match="it is rollout 7, and this run continues with rollout 8"):
        read(tmp_path, number=8)
    with pytest.raises(BadRow, match=r"generated with --temperature 0\.7, and this run has 1\.0"):
        read(tmp_path, settings={**SETTINGS, "temperature": 1.0})
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes().replace(b'"stop"', b'"halt"', 1))
    with pytest.raises(BadRow, match="its checksum does not match"):
        read(tmp_path)
