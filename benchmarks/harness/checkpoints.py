"""Checkpoints of shapes, made when they are first needed, by a process of its own: it frees its GPU memory."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

from .paths import REPOSITORY
from .processes import devices_locked
from .workload import TEMPLATE_TOKENS_FILE


def made_checkpoint(work: Path, shape: str, with_weights: bool = True) -> Path:
    """Return the folder of a shape's checkpoint in `work`, with random weights or with none."""
    folder = work / "models" / (shape if with_weights else f"{shape}-random")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:  # groups that run side by side share checkpoints
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / TEMPLATE_TOKENS_FILE).exists():
            command = [sys.executable, "-m", "benchmarks.harness.models", shape, str(folder)]
            command += [] if with_weights else ["--no-weights"]
            # vLLM does not start on a GPU whose memory another process returns meanwhile.
            with devices_locked() if with_weights else nullcontext():
                subprocess.run(command, check=True, cwd=REPOSITORY)
    return folder
