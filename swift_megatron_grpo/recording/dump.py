"""Every rollout of a run on disk, so that another run can train on the same completions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from swift_megatron_grpo.recording.folder import Settings, path_of, paths_of, rollouts_in, write_settings
from swift_megatron_grpo.recording.rows import to_line
from swift_megatron_grpo.types import Graded


class RolloutDump:
    """Of one rank; the others hold one that does not write."""

    def __init__(self, folder: Path, settings: Settings, first: int, writes_here: bool) -> None:
        self._folder = folder
        self._writes_here = writes_here
        if writes_here:
            folder.mkdir(parents=True, exist_ok=True)
            write_settings(folder, settings)
            for number in rollouts_in(folder):  # of this run, before it was interrupted; they come again
                if number >= first:
                    for path in paths_of(folder, number):
                        path.unlink()

    def write(self, rollout: int, draw: int, graded: Sequence[Graded]) -> None:
        """The file has its name when it is complete, and not before."""
        if not self._writes_here:
            return
        path = path_of(self._folder, rollout, draw)
        unfinished = path.with_suffix(".part")
        with unfinished.open("w", encoding="utf-8") as file:
            file.writelines(map(to_line, graded))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
