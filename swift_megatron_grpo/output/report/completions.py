"""Read the first and the newest rollouts of completions.jsonl, whose middle may have gigabytes and is never read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_megatron_grpo.output.report.run_files import finite, parse_lines

FILE = "completions.jsonl"
_TYPES = {"rollout": int, "gen_step": int, "prompt": str, "completion": str, "tokens": int, "truncated": bool}
FIXED = {*_TYPES, "advantages", "total_reward"}
_LARGEST = 2**53  # of whole numbers; the script of the page reads larger ones as others
_FIRST_SHARE = 0.25  # of the limit, for the beginning of the file


@dataclass(frozen=True)
class Completion:
    """One completion with its rewards, in the order of `Completions.functions`."""

    rollout: int
    weights_version: int
    prompt: str
    text: str
    rewards: list[float | None]
    total: float | None
    advantage: float | None
    tokens: int
    truncated: bool


@dataclass(frozen=True)
class Completions:
    functions: list[str]
    rows: list[Completion]
    left_out: str | None  # what is not here


def read_completions(folder: Path, limit: int) -> Completions | None:
    """Read the completions of a run; None if it did not log them."""
    path = folder / FILE
    if not path.is_file():
        return None
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= limit:
            rows, left_out = _parse(file.read(size)), None
        else:
            first = int(limit * _FIRST_SHARE)
            head = whole_rollouts(_parse(file.read(first).rpartition(b"\n")[0]), cut_at_end=True)
            file.seek(size - (limit - first))
            tail = whole_rollouts(_parse(file.read(limit - first).partition(b"\n")[2]), cut_at_end=False)
            rows, left_out = head + tail, _describe(head, tail, limit, size)
    rows = last_run(rows)
    functions = list(dict.fromkeys(name for row in rows for name in row if name not in FIXED))
    return Completions(functions, [_completion(row, functions) for row in rows], left_out)


def _parse(content: bytes) -> list[dict[str, Any]]:
    """Return the rows. Split at newlines only: completions may contain other characters that end lines."""
    rows = parse_lines(content.decode("utf-8", errors="replace").split("\n"))[0]
    return [row for row in rows if row.keys() >= FIXED and all(_fits(row[name], kind) for name, kind in _TYPES.items())]


def _fits(value: Any, kind: type) -> bool:
    return type(value) is kind and (not isinstance(value, int) or abs(value) <= _LARGEST)


def whole_rollouts(rows: list[dict[str, Any]], cut_at_end: bool) -> list[dict[str, Any]]:
    """Drop the rollout that the limit cut, unless there is no other."""
    cut = rows[-1 if cut_at_end else 0]["rollout"] if rows else None
    return [row for row in rows if row["rollout"] != cut] or rows


def last_run(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the last run of the folder, which begins where rollouts are counted from an earlier one."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        if kept and row["rollout"] < kept[-1]["rollout"]:
            kept = [earlier for earlier in kept if earlier["rollout"] < row["rollout"]]
        kept.append(row)
    return kept


def _describe(head: Sequence[dict[str, Any]], tail: Sequence[dict[str, Any]], limit: int, size: int) -> str:
    where = f"the page holds {limit / 2**20:.3g} of {size / 2**20:.3g} MB of {FILE}"
    if not head or not tail:
        return where
    first, last = head[-1]["rollout"] + 1, tail[0]["rollout"] - 1
    return f"rollouts {first} to {last} are left out: {where}" if first <= last else where


def _completion(row: dict[str, Any], functions: Sequence[str]) -> Completion:
    return Completion(
        rollout=row["rollout"], weights_version=row["gen_step"], prompt=row["prompt"], text=row["completion"],
        rewards=[finite(row.get(name)) for name in functions], total=finite(row["total_reward"]),
        advantage=finite(row["advantages"]), tokens=row["tokens"], truncated=row["truncated"],
    )  # fmt: skip
