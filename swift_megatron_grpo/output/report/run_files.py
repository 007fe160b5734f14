"""Read logging.jsonl and args.json from the folder of a run, also while the run writes them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOG, ARGUMENTS = "logging.jsonl", "args.json"
_EVALUATION = "eval_"
_LARGEST = 3.4028234663852886e38  # the largest finite fp32 value: a run computes in fp32
_STEP = re.compile(r"\d{1,15}(?:/(\d{1,15})?|$)", re.ASCII)  # "7/30"
_SECRET = re.compile(
    r"secret|passw|credential|authorization|(api|access|private).?key|(?<!special_)tokens?$", re.IGNORECASE
)
_NOT_METRICS = {"iteration", "elapsed_time", "remaining_time", "train_speed(s/it)"}


class NoRun(Exception):
    """A folder has no files of a run."""


@dataclass(frozen=True)
class Table:
    """Metrics by name, one value per logged step; None where a step has none."""

    steps: list[int]
    values: dict[str, list[float | None]]


@dataclass(frozen=True)
class RunFiles:
    """The log and the settings of one run."""

    folder: Path
    training: Table
    evaluation: Table
    total_steps: int | None
    elapsed: str | None  # in ms-swift's words
    ended: bool  # the summary that ms-swift writes last is there
    settings: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def read_run(folder: Path) -> RunFiles:
    """Read a run's folder. Raise NoRun if it holds no log with a step in it, and no settings."""
    settings, notes = read_settings(folder / ARGUMENTS)
    rows, broken = read_rows(folder / LOG)
    if broken:
        notes.append(f"{broken} incomplete line(s) of {LOG} are left out")
    if not rows and not settings:
        raise NoRun(f"{folder} has neither {LOG} nor {ARGUMENTS}; give the --output_dir of a run")
    rows = last_run([row for row in rows if "iteration" not in row or _STEP.match(str(row["iteration"]))])
    logged = [row for row in rows if "iteration" in row]
    training = table([row for row in logged if not is_evaluation(row)])
    evaluation = table([row for row in logged if is_evaluation(row)])
    notes += not_finite(logged)
    last = logged[-1] if logged else {}
    total = _STEP.match(str(last.get("iteration")))
    elapsed = last.get("elapsed_time")
    return RunFiles(
        folder=folder,
        training=training,
        evaluation=evaluation,
        total_steps=int(total[1]) if total and total[1] else None,
        elapsed=elapsed if isinstance(elapsed, str) else None,
        ended=bool(rows) and "last_model_checkpoint" in rows[-1],
        settings=settings,
        notes=notes,
    )


def read_settings(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the settings without secrets, and notes if they cannot be read."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_secrets)
    except FileNotFoundError:
        return {}, [f"there is no {ARGUMENTS}, so settings are not shown"]
    except (OSError, ValueError, RecursionError) as error:
        return {}, [f"{ARGUMENTS} cannot be read ({error}), so settings are not shown"]
    return (settings, []) if isinstance(settings, dict) else ({}, [f"{ARGUMENTS} holds no settings"])


def _without_secrets(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of args.json, of any depth, without values that a report should not spread."""
    shown = dict(pairs)
    for name, value in pairs:
        if value and not is_number(value) and _SECRET.search(name):
            shown[name] = "(not shown)"
        else:
            shown[name] = _without_secrets_in_text(value)
    return shown


def _without_secrets_in_text(value: Any) -> Any:
    """Return a value of args.json whose texts may be JSON, as those of some flags are."""
    if isinstance(value, list):
        return [_without_secrets_in_text(each) for each in value]
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        with suppress(ValueError, RecursionError):
            return json.dumps(json.loads(value, object_pairs_hook=_without_secrets))
    return value


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a file of one JSON object per line, and the number of other lines."""
    if not path.is_file():
        return [], 0
    with path.open(encoding="utf-8", errors="replace") as file:
        return parse_lines(file)


def parse_lines(lines: Iterator[str] | Sequence[str]) -> tuple[list[dict[str, Any]], int]:
    rows: list[dict[str, Any]] = []
    broken = 0
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            broken += bool(line.strip())
    return rows, broken


def last_run(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the last run: ms-swift appends to the log of an earlier run and repeats its steps."""
    kept: list[dict[str, Any]] = []
    newest = 0
    for row in rows:
        if "iteration" in row and not is_evaluation(row):
            step = step_of(row)
            if step <= newest:
                kept = [earlier for earlier in kept if "iteration" in earlier and step_of(earlier) < step]
            newest = step
        kept.append(row)
    return kept


def is_evaluation(row: Mapping[str, Any]) -> bool:
    return any(name.startswith(_EVALUATION) for name in row)


def step_of(row: Mapping[str, Any]) -> int:
    return int(str(row["iteration"]).partition("/")[0])  # "7/30"


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Turn rows into columns. Values that are not finite become None: JSON has no NaN."""
    names = dict.fromkeys(
        name for row in rows for name, value in row.items() if name not in _NOT_METRICS and is_number(value)
    )
    columns = {name: [finite(row.get(name)) for row in rows] for name in names}
    return Table([step_of(row) for row in rows], columns)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def finite(value: Any) -> float | None:
    """Return a number that is finite in fp32, so that sums and differences of such numbers are finite in fp64."""
    return float(value) if is_number(value) and abs(value) <= _LARGEST else None


def not_finite(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a note for each metric with NaN or infinity: where it began."""
    first: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            if is_number(value) and finite(value) is None:
                first.setdefault(name, step_of(row))
    return [f"{name} is not finite at step {step}" for name, step in first.items()]


def thinned(columns: Table, limit: int) -> tuple[Table, int]:
    """Return at most `limit` points per curve, each the mean of neighbouring steps, and the number of these steps."""
    size = -(-len(columns.steps) // limit) if columns.steps else 1
    if size <= 1:
        return columns, 1
    starts = range(0, len(columns.steps), size)
    steps = [columns.steps[min(start + size, len(columns.steps)) - 1] for start in starts]
    values = {
        name: [_merge(name, column[start : start + size]) for start in starts]
        for name, column in columns.values.items()
    }
    return Table(steps, values), size


def _merge(name: str, values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if name.endswith(("_max", "max_length", "max_diff")):
        return max(known)
    return min(known) if name.endswith(("_min", "min_length")) else sum(known) / len(known)
