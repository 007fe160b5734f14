"""A readable report of this rank's unfinished collectives, from torch's flight recorder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch._C import _distributed_c10d

# The recorder of NCCL, in CUDA builds only, and the one of the other backends.
_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_SHOWN = 20


def describe_collectives() -> str:
    """Describe the collectives that this process has recorded."""
    built = [vars(_distributed_c10d)[name] for name in _RECORDERS if name in vars(_distributed_c10d)]
    entries = [entry for dump in built for entry in _entries(dump)]
    return format_entries(entries, time.time_ns())


def format_entries(entries: Sequence[dict[str, Any]], now: int) -> str:
    """List the collectives that have not finished, and the last one that has."""
    if not entries:
        return "collectives: none recorded"
    entries = sorted(entries, key=lambda entry: int(entry["time_created_ns"]))
    unfinished = [entry for entry in entries if not _finished(entry)]
    lines = [f"collectives, not finished: {len(unfinished)}"]
    lines += [f"  {_line(entry, now)}" for entry in unfinished[-_SHOWN:]]
    finished = [entry for entry in entries if _finished(entry)]
    if finished:
        lines.append(f"last finished: {_line(finished[-1], now)}")
    return "\n".join(lines)


def _entries(dump: Callable[[], bytes]) -> list[dict[str, Any]]:
    trace = json.loads(dump())
    entries: list[dict[str, Any]] = trace.get("entries", [])
    return entries


def _finished(entry: dict[str, Any]) -> bool:
    return bool(entry["retired"]) or entry["state"] == "completed"


def _line(entry: dict[str, Any], now: int) -> str:
    group = " ".join(entry["process_group"])
    ago = (now - int(entry["time_created_ns"])) / 1e9
    return f"{entry['profiling_name']} of {entry['input_sizes']} in group {group}, {ago:.1f} s ago"
