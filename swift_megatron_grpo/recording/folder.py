"""The folder of recorded rollouts: settings.json, and one file per rollout (with --dynamic_sample, one per draw)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

FORMAT = 1
SETTINGS = "settings.json"
_FIRST_DRAW = re.compile(r"rollout-(\d+)\.jsonl")


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
    """Return the files of all draws of a rollout."""
    return [rollout_path(folder, rollout, 0), *folder.glob(f"rollout-{rollout:06}-draw-*.jsonl")]


def recorded_rollouts(folder: Path) -> list[int]:
    """Return the numbers of the rollouts in the folder, in order."""
    matches = (_FIRST_DRAW.fullmatch(path.name) for path in folder.glob("rollout-*.jsonl"))
    return sorted(int(match[1]) for match in matches if match)


def write_settings(folder: Path, settings: Settings) -> None:
    (folder / SETTINGS).write_text(json.dumps({"format": FORMAT, **asdict(settings)}, indent=1) + "\n")


def check_dump(folder: Path, settings: Settings, resumes: bool) -> None:
    """Raise ValueError if the folder would mix rollouts of this run with those of another run."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--rollout_dump {folder} is a file; give a folder")
    if not recorded_rollouts(folder):
        return
    if not resumes:
        raise ValueError(
            f"--rollout_dump {folder} holds rollouts of another run; give a folder that is empty or does not exist"
        )
    _check_settings(folder, settings, f"--rollout_dump {folder}", "or dump to another folder")


def check_replay(folder: Path, settings: Settings) -> None:
    """Raise ValueError if the folder is not a dump, or was dumped with other settings."""
    if not (folder / SETTINGS).is_file():
        fault = f"has no {SETTINGS}" if folder.is_dir() else "does not exist"
        raise ValueError(f"--rollout_replay {folder}: the folder {fault}; give one that --rollout_dump has written")
    _check_settings(folder, settings, f"--rollout_replay {folder}", "")


def check_rollouts_exist(folder: Path, first: int, rollouts: int, steps_per_rollout: int) -> None:
    """Raise ValueError unless the folder has complete files of rollouts `first` to `first + rollouts - 1`."""
    recorded = recorded_rollouts(folder)
    missing = next((number for number in range(first, first + rollouts) if number not in recorded), None)
    if missing is not None:
        ending = f"; use --train_iters {missing * steps_per_rollout} or less" if missing > first else ""
        raise ValueError(
            f"--rollout_replay {folder} has no rollout {missing} ({rollout_path(folder, missing, 0).name}), but this "
            f"run needs {first} to {first + rollouts - 1}; it has {_format_ranges(recorded)}{ending}"
        )
    for path in (rollout_path(folder, number, 0) for number in range(first, first + rollouts)):
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - 1, 0))
            if file.read() != b"\n":
                raise ValueError(
                    f"{path}: the last line is cut off, so the file is incomplete; copy it again from the original dump"
                )


def _check_settings(folder: Path, settings: Settings, flag: str, alternative: str) -> None:
    try:
        recorded = json.loads((folder / SETTINGS).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{flag}: {SETTINGS} cannot be read: {error}") from None
    if recorded.get("format") != FORMAT:
        raise ValueError(f"{flag} is in format {recorded.get('format')}, but this version reads format {FORMAT}")
    for name in (field.name for field in fields(Settings)):
        value = getattr(settings, name)
        here, there = (list(value) if isinstance(value, tuple) else value), recorded.get(name)
        if here != there:
            setting = "the reward functions" if name == "reward_funcs" else name
            advice = " ".join(filter(None, [_advice(name, there), alternative]))
            raise ValueError(f"{flag} was dumped with {setting} {there}, but this run has {here}; {advice}")


def _advice(name: str, value: object) -> str:
    return "use the same --reward_funcs" if name == "reward_funcs" else f"use --{name} {value}"


def _format_ranges(numbers: Sequence[int]) -> str:
    """Format [3, 4, 5, 9] as "3 to 5, 9"."""
    if not numbers:
        return "none"
    begins = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(
        str(begin) if begin == end else f"{begin} to {end}" for begin, end in zip(begins, ends, strict=True)
    )
