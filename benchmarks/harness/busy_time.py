"""Profiles generation: the kernels of the GPU, and the functions of the host."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

KERNELS = 25
FUNCTIONS = 80


def kernels_of(generate: Callable[[], None], tokens: int) -> dict[str, Any]:
    """Return how long kernels keep the GPU busy for a token of every completion, and those that take longest.

    The profiler slows down the host, so the wall-clock time of `generate` means nothing.
    """
    gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as recorded:
        generate()
    events = recorded.key_averages()
    times = [event.self_device_time_total if gpu else event.self_cpu_time_total for event in events]
    rows = [(event.key, time / 1e6, event.count) for event, time in zip(events, times, strict=True)]
    rows.sort(key=lambda row: -row[1])
    busy = sum(seconds for _, seconds, _ in rows)
    kernels = [{"name": name, "seconds": seconds, "calls": calls} for name, seconds, calls in rows[:KERNELS]]
    return {"tokens": tokens, "busy_seconds_per_token": busy / tokens, "kernels": kernels}


def functions_of(generate: Callable[[], None]) -> list[dict[str, Any]]:
    """Return the functions of this thread that take longest, by the time in themselves.

    The profiler slows down each call, so functions can be compared with each other alone.
    """
    recorded = cProfile.Profile()
    recorded.runcall(generate)
    rows = []
    for (path, line, name), (_, calls, own, total, _) in pstats.Stats(recorded).stats.items():  # type: ignore[attr-defined]
        place = f"{'/'.join(path.split('/')[-3:])}:{line} {name}"
        rows.append({"name": place, "seconds": own, "with_callees": total, "calls": calls})
    return sorted(rows, key=lambda row: -row["seconds"])[:FUNCTIONS]
