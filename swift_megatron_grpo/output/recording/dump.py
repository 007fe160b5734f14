"""Writer of --rollout_dump: every rollout of a run on disk, so that another run can train on the same completions.

Groups are appended to a partial file as they are graded, for a run that is stopped within a rollout.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from swift_megatron_grpo.output.disk.files import write_durably
from swift_megatron_grpo.output.disk.full_disk import naming_full_disk
from swift_megatron_grpo.output.recording import folder as recording
from swift_megatron_grpo.output.recording.rows import Digests, no_images, to_lines
from swift_megatron_grpo.types import Graded

_ADVICE = "free space there, or leave the flag out"
logger = logging.getLogger(__name__)


class RolloutDump:
    """Writer of rollouts. Every rank has one, but only the one with `writes_here` writes."""

    def __init__(
        self,
        folder: Path,
        settings: recording.Settings,
        first: int,
        writes_here: bool,
        digests: Digests = no_images,
        flags: Mapping[str, str] | None = None,
        keeps_later: bool = False,
    ) -> None:
        """`first`: the rollout with which this run begins; later ones are removed, unless it `keeps_later` ones."""
        self._folder, self._digests, self._writes_here = folder, digests, writes_here
        if writes_here:
            folder.mkdir(parents=True, exist_ok=True)
            if not keeps_later:  # the run generates the rollouts from `first` on again
                later = (number for number in recording.recorded_rollouts(folder) if number >= first)
                files = [path for number in later for path in recording.draw_paths(folder, number)]
                for path in (*files, *folder.glob("rollout-*.partial")):
                    path.unlink()
            with naming_full_disk(folder, "--rollout_dump", _ADVICE):
                recording.write_settings(folder, settings, flags or {})

    def write(self, rollout: int, draw: int, graded: Sequence[Graded]) -> None:
        """Write one file. It gets its final name only once it is complete."""
        if not self._writes_here:
            return
        path = recording.rollout_path(self._folder, rollout, draw)
        with naming_full_disk(path, "--rollout_dump", _ADVICE):
            write_durably(path, to_lines(graded, self._digests))
            recording.partial_path(path).unlink(missing_ok=True)

    def append(self, rollout: int, draw: int, graded: Iterable[Graded]) -> None:
        """Append whole groups to the partial file. Its loss costs only their generation, so no error ends the run."""
        if not self._writes_here:
            return
        path = recording.partial_path(recording.rollout_path(self._folder, rollout, draw))
        try:
            with path.open("a", encoding="utf-8", newline="\n") as file:
                file.writelines(to_lines(graded, self._digests))
        except OSError as error:
            logger.warning(f"--rollout_dump cannot append to {path}: {error}")
