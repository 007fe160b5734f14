"""A folder of rollouts: settings.json, and a file for every rollout; with --dynamic_sample one for every draw."""

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
    """What a replay must have in common with the run that was dumped; by the names of the flags."""

    num_generations: int
    generation_batch_size: int
    temperature: float
    reward_funcs: tuple[str, ...]  # by the names of their classes: a line holds one reward for each


def path_of(folder: Path, rollout: int, draw: int) -> Path:
    return folder / (f"rollout-{rollout:06}" + (f"-draw-{draw}" if draw else "") + ".jsonl")


def paths_of(folder: Path, rollout: int) -> list[Path]:
    """Of all its draws."""
    return [path_of(folder, rollout, 0), *folder.glob(f"rollout-{rollout:06}-draw-*.jsonl")]


def rollouts_in(folder: Path) -> list[int]:
    found = (_FIRST_DRAW.fullmatch(path.name) for path in folder.glob("rollout-*.jsonl"))
    return sorted(int(match[1]) for match in found if match)


def write_settings(folder: Path, settings: Settings) -> None:
    (folder / SETTINGS).write_text(json.dumps({"format": FORMAT, **asdict(settings)}, indent=1) + "\n")


def check_dump(folder: Path, settings: Settings, resumes: bool) -> None:
    """ValueError where rollouts of this run and of another would lie side by side."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--rollout_dump {folder} is a file; give a folder")
    if not rollouts_in(folder):
        return
    if not resumes:
        raise ValueError(
            f"--rollout_dump {folder} holds rollouts of another run; give a folder that is empty or does not exist"
        )
    _compare(folder, settings, f"--rollout_dump {folder}", "or dump to another folder")


def check_replay(folder: Path, settings: Settings) -> None:
    if not (folder / SETTINGS).is_file():
        what = f"holds no {SETTINGS}" if folder.is_dir() else "does not exist"
        raise ValueError(f"--rollout_replay {folder}: the folder {what}; give one that --rollout_dump has written")
    _compare(folder, settings, f"--rollout_replay {folder}", "")


def check_reach(folder: Path, first: int, rollouts: int, steps_per_rollout: int) -> None:
    """ValueError unless the folder holds the rollouts `first` to `first + rollouts - 1`, each of them to its end."""
    held = rollouts_in(folder)
    missing = next((number for number in range(first, first + rollouts) if number not in held), None)
    if missing is not None:
        ending = f"; use --train_iters {missing * steps_per_rollout} or less" if missing > first else ""
        raise ValueError(
            f"--rollout_replay {folder} has no rollout {missing} ({path_of(folder, missing, 0).name}), and this run "
            f"needs {first} to {first + rollouts - 1}; it has {_ranges(held)}{ending}"
        )
    for path in (path_of(folder, number, 0) for number in range(first, first + rollouts)):
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - 1, 0))
            if file.read() != b"\n":
                raise ValueError(
                    f"{path}: the last line is cut off, so the file is not complete; copy it again from where it was "
                    "dumped"
                )


def _compare(folder: Path, mine: Settings, flag: str, otherwise: str) -> None:
    try:
        theirs = json.loads((folder / SETTINGS).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{flag}: {SETTINGS} cannot be read: {error}") from None
    if theirs.get("format") != FORMAT:
        raise ValueError(f"{flag} is in format {theirs.get('format')}, and this version reads format {FORMAT}")
    for name in (field.name for field in fields(Settings)):
        value = getattr(mine, name)
        here, there = (list(value) if isinstance(value, tuple) else value), theirs.get(name)
        if here != there:
            what = "the reward functions" if name == "reward_funcs" else name
            advice = " ".join(filter(None, [_use(name, there), otherwise]))
            raise ValueError(f"{flag} was dumped with {what} {there}, and this run has {here}; {advice}")


def _use(name: str, value: object) -> str:
    return "use the same --reward_funcs" if name == "reward_funcs" else f"use --{name} {value}"


def _ranges(numbers: Sequence[int]) -> str:
    """3 4 5 9 as "3 to 5, 9"."""
    if not numbers:
        return "none"
    begins = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(
        str(begin) if begin == end else f"{begin} to {end}" for begin, end in zip(begins, ends, strict=True)
    )
