"""Ranks do not write the environment while threads of NCCL may read it."""

import json
import os
from pathlib import Path

import pytest
from datasets import Dataset
from datasets.download import download_manager
from datasets.utils.file_utils import stack_multiprocessing_download_progress_bars

from swift_megatron_grpo.plugin.rank import leave_environment_alone


def removed_while_reading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the environment variables that datasets removes while it reads a file."""
    folder.mkdir()
    (folder / "rows.jsonl").write_text(json.dumps({"solution": "7"}) + "\n")
    removed: list[bytes] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "unsetenv", removed.append)
        rows = Dataset.from_json(str(folder / "rows.jsonl"), cache_dir=str(folder / "cache"))
    assert rows[0] == {"solution": "7"}
    return removed


def test_reading_a_dataset_leaves_the_environment_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = stack_multiprocessing_download_progress_bars.__name__
    monkeypatch.setattr(download_manager, name, stack_multiprocessing_download_progress_bars)
    monkeypatch.setenv("HF_DATASETS_STACK_MULTIPROCESSING_DOWNLOAD_PROGRESS_BARS", "0")
    assert b"PATH" in removed_while_reading(tmp_path / "stock", monkeypatch), "datasets no longer needs this fix"
    leave_environment_alone(download_manager)
    assert not removed_while_reading(tmp_path / "ours", monkeypatch)
