"""Writer of --rollout_dump: every rollout of a run on disk, so that another run can train on the same completions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swift_megatron_grpo.disk.durable import write_durably
from swift_megatron_grpo.disk.full_disk import naming_full_disk
from swift_megatron_grpo.recording.folder import Settings, draw_paths, recorded_rollouts, rollout_path, write_settings
from swift_megatron_grpo.recording.rows import Digests, no_images, once_per_prompt, to_line
from swift_megatron_grpo.types import Graded

_ADVICE = "free space there, or leave the flag out"


class RolloutDump:
    """Writer of rollouts. Every rank has one, but only the one with `writes_here` writes."""

    def __init__(
        self, folder: Path, settings: Settings, first: int, writes_here: bool, digests: Digests = no_images
    ) -> None:
        self._folder, self._digests = folder, digests
        self._writes_here = writes_here
        if writes_here:
            folder.mkdir(parents=True, exist_ok=True)
            for number in recorded_rollouts(folder):  # a resumed run generates the rollouts from `first` on again
                if number >= first:
                    for path in draw_paths(folder, number):
                        path.unlink()
            with naming_full_disk(folder, "--rollout_dump", _ADVICE):
                write_settings(folder, settings)

    def write(self, rollout: int, draw: int, graded: Sequence[Graded]) -> None:
        """Write one file. It gets its final name only once it is complete."""
        if not self._writes_here:
            return
        path, images = rollout_path(self._folder, rollout, draw), once_per_prompt(self._digests)
        with naming_full_disk(path, "--rollout_dump", _ADVICE):
            write_durably(path, (to_line(completion, images(completion.rollout.prompt)) for completion in graded))
