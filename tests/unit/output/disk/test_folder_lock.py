"""A folder belongs to one process at a time, until that process ends, however it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from swift_megatron_grpo.output.disk import folder_lock
from swift_megatron_grpo.output.disk.folder_lock import FolderInUse, FolderLock, FolderNotShared, check_shared
from tests.paths import REPOSITORY

HOLD = """
import os, sys, time
from pathlib import Path
from swift_megatron_grpo.output.disk.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), "--output_dir")
child = os.fork()  # as the helpers of a rank, which may outlive it
if child == 0:
    time.sleep(60)
print(child, flush=True)
time.sleep(60)
"""


def test_a_folder_in_use_is_refused_with_its_owner_until_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        owner = rf"process {process.pid} on {socket.gethostname()}"
        with pytest.raises(FolderInUse, match=rf"--output_dir {folder} is in use by another run \({owner}\); wait"):
            FolderLock(folder, "--output_dir")
        process.kill()
        process.wait()
        FolderLock(folder, "--output_dir")
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)


def test_a_released_folder_can_be_locked_again(tmp_path: Path) -> None:
    FolderLock(tmp_path, "--rollout_dump")
    FolderLock(tmp_path, "--rollout_dump")
    assert [path.name for path in tmp_path.iterdir()] == [".run.lock"]


def test_a_machine_with_a_folder_of_its_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "SEEN_SECONDS", 0.3)
    of_rank_0, own, missing = tmp_path / "shared", tmp_path / "own", tmp_path / "missing"
    lock = FolderLock(of_rank_0, "--output_dir")
    check_shared(of_rank_0, lock.content)
    FolderLock(own, "--output_dir")  # of an earlier run on that machine
    for folder in (own, missing):
        with pytest.raises(FolderNotShared, match=f"--output_dir {folder}: {socket.gethostname()} does not see"):
            check_shared(folder, lock.content)
