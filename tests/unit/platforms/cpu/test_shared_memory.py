"""Check which shared memory of vLLM's ranks is removed; the templates with two ranks of vLLM create it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from swift_megatron_grpo.platforms.cpu.fixes import remove_memory_of_ended_processes


def test_memory_of_ended_processes_is_removed_and_that_of_others_is_kept(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    kept = {f"{os.getpid()}-tp:0-[0-1]-cpushm_0", "31000-tp:0", "-tp:0-[0-1]-cpushm_1"}
    for name in (*kept, f"{ended.pid}-tp:0-[0-1]-cpushm_0"):
        (tmp_path / name).touch()
    remove_memory_of_ended_processes(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == kept
