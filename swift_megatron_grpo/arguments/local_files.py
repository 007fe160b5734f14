"""Files and folders that flags name: what looks local must exist, and datasets of JSON lines must be readable.

Otherwise ms-swift takes a missing file for a dataset of a hub, and searches for it for 45 s per file.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from pathlib import Path

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".txt", ".parquet", ".arrow")
_SAMPLED = re.compile(r"#\d+$")  # the number of rows


def check_datasets(flag: str, typed: Sequence[str]) -> None:
    """Check the datasets of --dataset or --val_dataset that are files, or look as if they should be."""
    problems = [problem for dataset in typed if (problem := _problem_of_dataset(flag, dataset)) is not None]
    if problems:
        raise ValueError("\n".join(problems))


def _problem_of_dataset(flag: str, typed: str) -> str | None:
    path = Path(typed)
    if not path.exists():
        path = Path(_SAMPLED.sub("", typed))
    if path.is_file() and str(path) != typed and int(typed.rpartition("#")[2]) == 0:
        return f"--{flag} {typed} takes none of its rows; use --{flag} {path}#500, or the file without a number"
    if path.is_file() and path.stat().st_size == 0:
        return f"--{flag} {typed}: the file is empty; use a file with one JSON object per line"
    if path.exists() or not _looks_local(str(path)):
        return None
    if str(path).startswith("~") and path.expanduser().exists():
        return f"--{flag} {typed}: ms-swift does not expand ~; use --{flag} {path.expanduser()}"
    return f"--{flag} {typed}: {path.absolute()} does not exist{similar(path)}; use the path of a file, or a hub id"


def _looks_local(path: str) -> bool:
    return path.startswith(("/", "./", "../", "~")) or Path(path).suffix.lower() in DATA_SUFFIXES


def explain_unreadable(flag: str, typed: Sequence[str]) -> None:
    """Raise ValueError for the first line of a dataset's files that is not a JSON object.

    Files are read only after they could not be loaded: they may be large.
    """
    for dataset in typed:
        path = Path(dataset if Path(dataset).exists() else _SAMPLED.sub("", dataset))
        if path.is_file() and path.suffix.lower() == ".jsonl":
            _check_lines(flag, path)


def _check_lines(flag: str, path: Path) -> None:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            fault = None
            try:
                if line.strip() and not isinstance(json.loads(line), dict):
                    fault = "not a JSON object"
            except ValueError as error:
                fault = f"not JSON ({error})"
            if fault is not None:
                raise ValueError(f"--{flag} {path}, line {number}: {fault}; use one JSON object per line")


def check_folder(flag: str, typed: str, has: Sequence[str]) -> None:
    """Check that a folder of this machine exists and has one of these files (patterns)."""
    path = Path(typed).expanduser()
    if not path.is_dir():
        raise ValueError(
            f"--{flag} {typed}: the folder {path.absolute()} does not exist{similar(path)}; use one that a run has "
            "saved, or leave it out"
        )
    if not any(any(path.glob(pattern)) for pattern in has):
        raise ValueError(
            f"--{flag} {typed}: the folder {path.absolute()} has no {has[0]}; use a checkpoint that a run has "
            "saved, or leave it out"
        )


def check_file(flag: str, typed: str) -> None:
    if not Path(typed).expanduser().is_file():
        raise ValueError(f"--{flag} {typed}: the file {Path(typed).absolute()} does not exist; use another path, or "
                         "leave it out")  # fmt: skip


def check_output(flag: str, typed: str) -> None:
    """Check that a folder can be created there."""
    path = Path(typed).expanduser().absolute()
    file = next((parent for parent in (path, *path.parents) if parent.is_file()), None)
    if file is not None:
        raise ValueError(f"--{flag} {typed}: {file} is a file; use --{flag} {path.with_suffix('')}_run")


def similar(path: Path) -> str:
    """Return a phrase with the names next to a missing path that are like it."""
    if not path.parent.is_dir():
        return ""
    close = difflib.get_close_matches(path.name, [sibling.name for sibling in path.parent.iterdir()])
    return f" (next to it: {', '.join(close)})" if close else ""
