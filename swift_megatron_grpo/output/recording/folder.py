"""The folder of recorded rollouts: settings.json, and one file per rollout (with --dynamic_sample, one per draw).

Groups are appended to a partial file as they are graded, for a run that is stopped within a rollout.
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swift_megatron_grpo.output.disk.files import checksum, write_durably
from swift_megatron_grpo.output.disk.full_disk import naming_full_disk
from swift_megatron_grpo.output.recording.rows import BadRow, Digests, check_line, no_images, to_lines
from swift_megatron_grpo.types import Graded

FORMAT = 2
SETTINGS = "settings.json"
_SHOWN = 3  # flags that differ
_ADVICE = "free space there, or leave the flag out"
_FIRST_DRAW = re.compile(r"rollout-(\d+)\.jsonl")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that a replay must share with the dumped run, named like the flags."""

    num_generations: int
    generation_batch_size: int
    temperature: float
    reward_funcs: tuple[str, ...]  # names of the reward functions; a line has one reward for each


def rollout_path(folder: Path, rollout: int, draw: int) -> Path:
    """Return the file of one draw; draw 0 is the first."""
    return folder / (f"rollout-{rollout:06}" + (f"-draw-{draw}" if draw else "") + ".jsonl")


def draw_paths(folder: Path, rollout: int) -> list[Path]:
    return [rollout_path(folder, rollout, 0), *sorted(folder.glob(f"rollout-{rollout:06}-draw-*.jsonl"))]


def partial_path(path: Path) -> Path:
    """Return the file to which the completions of an unfinished draw are appended, in place of its file `path`."""
    return path.with_suffix(".partial")


def recorded_rollouts(folder: Path) -> list[int]:
    matches = (_FIRST_DRAW.fullmatch(path.name) for path in folder.glob("rollout-*.jsonl"))
    return sorted(int(match[1]) for match in matches if match)


def write_settings(folder: Path, settings: Settings, flags: Mapping[str, str]) -> None:
    """Write settings.json. `flags`: those of the run that decide what it generates and trains."""
    content = {"format": FORMAT, **asdict(settings), "flags": dict(flags)}
    content["crc32"] = _settings_checksum(content)
    write_durably(folder / SETTINGS, [json.dumps(content, indent=1) + "\n"])


def differing_flags(folder: Path, flags: Mapping[str, str]) -> str | None:
    """Return how the flags of the run that wrote a folder differ from these; None: they are the same."""
    try:
        recorded = _read_settings(folder).get("flags")
    except ValueError as problem:
        return str(problem)
    if not isinstance(recorded, dict) or not recorded or not flags:
        return f"{SETTINGS} does not have the flags of the run that generated them"
    names = [name for name in sorted({*recorded, *flags}) if recorded.get(name) != flags.get(name)]
    shown = [f"--{name} was {recorded.get(name)} and is {flags.get(name)}" for name in names[:_SHOWN]]
    return "; ".join(shown) or None


def read_lines(path: Path) -> list[bytes]:
    """Read a file of rollouts; raise BadRow with file and line if a line is damaged."""
    lines = split_lines(path.read_bytes())
    for number, line in enumerate(lines, start=1):
        try:
            check_line(line)
        except BadRow as problem:
            raise BadRow(f"{path}, line {number}: {problem}") from None
    return lines


def split_lines(content: bytes) -> list[bytes]:
    """Split after each newline only; bytes.splitlines() would also split at carriage returns."""
    *lines, rest = content.split(b"\n")
    return [line + b"\n" for line in lines] + ([rest] if rest else [])


def check_dump(folder: Path, settings: Settings, resumes: bool, flags: Mapping[str, str] | None = None) -> None:
    """Raise ValueError if the folder would mix rollouts of this run with those of another run.

    `flags`: given if the run may continue the rollouts of one that was stopped before its first checkpoint.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--rollout_dump {folder} is a file; give a folder")
    if not recorded_rollouts(folder):
        return
    if not resumes and (flags is None or differing_flags(folder, flags) is not None):
        raise ValueError(
            f"--rollout_dump {folder} holds rollouts of another run; give a folder that is empty or does not exist"
        )
    _check_settings(folder, settings, f"--rollout_dump {folder}", " or dump to another folder")


def check_replay(folder: Path, settings: Settings) -> None:
    """Raise ValueError if the folder is not a dump, or was dumped with other settings."""
    if not (folder / SETTINGS).is_file():
        fault = f"has no {SETTINGS}" if folder.is_dir() else "does not exist"
        raise ValueError(f"--rollout_replay {folder}: the folder {fault}; give one that --rollout_dump has written")
    _check_settings(folder, settings, f"--rollout_replay {folder}", "")


def check_rollouts(
    folder: Path, first: int, rollouts: int, steps_per_rollout: int, share: tuple[int, int] = (0, 1)
) -> None:
    """Raise ValueError unless it has these rollouts, with intact lines; each rank reads its `share` of the files."""
    recorded = recorded_rollouts(folder)
    missing = next((number for number in range(first, first + rollouts) if number not in recorded), None)
    if missing is not None:
        ending = f"; use --train_iters {missing * steps_per_rollout} or less" if missing > first else ""
        raise ValueError(
            f"--rollout_replay {folder} has no rollout {missing} ({rollout_path(folder, missing, 0).name}), but this "
            f"run needs {first} to {first + rollouts - 1}; it has {_format_ranges(recorded)}{ending}"
        )
    paths = [path for number in range(first, first + rollouts) for path in draw_paths(folder, number)]
    for path in paths[share[0] :: share[1]]:
        read_lines(path)


def _read_settings(folder: Path) -> dict[str, Any]:
    """Read settings.json; raise ValueError if it is damaged or of a format that this version does not read."""
    try:
        recorded = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # not there, not UTF-8, or not JSON
        raise ValueError(f"{SETTINGS} cannot be read: {error}") from None
    if not isinstance(recorded, dict):
        raise ValueError(f"{SETTINGS} is damaged: it is not a JSON object")
    if recorded.get("format") != FORMAT:
        raise ValueError(f"it is in format {recorded.get('format')}, but this version reads format {FORMAT}")
    if recorded.pop("crc32", None) != _settings_checksum(recorded):
        raise ValueError(f"{SETTINGS} is damaged: its checksum does not match; copy it again from the original dump")
    return recorded


def _settings_checksum(content: dict[str, Any]) -> str:
    return checksum(json.dumps(content).encode())


def _check_settings(folder: Path, settings: Settings, flag: str, alternative: str) -> None:
    try:
        recorded = _read_settings(folder)
    except ValueError as problem:
        raise ValueError(f"{flag}: {problem}") from None
    for name, value in asdict(settings).items():
        here, there = list(value) if isinstance(value, tuple) else value, recorded.get(name)
        if here != there:
            shown, advice = name, f"use --{name} {there}"
            if name == "reward_funcs":
                shown, advice = "the reward functions", "use the same --reward_funcs"
            raise ValueError(f"{flag} was dumped with {shown} {there}, but this run has {here}; {advice}{alternative}")


def _format_ranges(numbers: Sequence[int]) -> str:
    """Format [3, 4, 5, 9] as "3 to 5, 9"."""
    begins = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    ranges = [str(begin) if begin == end else f"{begin} to {end}" for begin, end in zip(begins, ends, strict=True)]
    return ", ".join(ranges) or "none"


class RolloutDump:
    """Writer of --rollout_dump. Every rank has one, but only the one with `writes_here` writes."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
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
                later = (number for number in recorded_rollouts(folder) if number >= first)
                files = [path for number in later for path in draw_paths(folder, number)]
                for path in (*files, *folder.glob("rollout-*.partial")):
                    path.unlink()
            with naming_full_disk(folder, "--rollout_dump", _ADVICE):
                write_settings(folder, settings, flags or {})

    def write(self, rollout: int, draw: int, graded: Sequence[Graded]) -> None:
        """Write one file. It gets its final name only once it is complete."""
        if not self._writes_here:
            return
        path = rollout_path(self._folder, rollout, draw)
        with naming_full_disk(path, "--rollout_dump", _ADVICE):
            write_durably(path, to_lines(graded, self._digests))
            partial_path(path).unlink(missing_ok=True)

    def append(self, rollout: int, draw: int, graded: Iterable[Graded]) -> None:
        """Append whole groups to the partial file. Its loss costs only their generation, so no error ends the run."""
        if not self._writes_here:
            return
        path = partial_path(rollout_path(self._folder, rollout, draw))
        try:
            with path.open("a", encoding="utf-8", newline="\n") as file:
                file.writelines(to_lines(graded, self._digests))
        except OSError as error:
            logger.warning(f"--rollout_dump cannot append to {path}: {error}")
