"""Trim the logs of a run that resumes in its own folder, so that every step and every rollout stands there once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def trim_logs(output_dir: str | Path, steps_done: int, rollouts_done: int) -> None:
    """Drop what the run logged after the checkpoint it resumes from; it computes these steps again."""
    folder = Path(output_dir)
    _keep_rows(folder / "logging.jsonl", lambda row: _iteration(row) <= steps_done)
    _keep_rows(folder / "completions.jsonl", lambda row: row.get("rollout", -1) < rollouts_done)


def _iteration(row: dict[str, Any]) -> int:
    """Return the step of a row of logging.jsonl; 0 for a summary that ms-swift writes after the last step."""
    return int(row["iteration"].partition("/")[0]) if "iteration" in row else 0


def _keep_rows(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if _is_kept(line, keep)]
    if kept != lines:
        trimmed = path.with_name(f".{path.name}.trimmed")
        trimmed.write_text("".join(kept), encoding="utf-8")
        os.replace(trimmed, path)


def _is_kept(line: str, keep: Callable[[dict[str, Any]], bool]) -> bool:
    try:
        return keep(json.loads(line))
    except json.JSONDecodeError:  # the process was killed while it wrote the last line
        return False
