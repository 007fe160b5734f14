"""Start a measured process and write its results, whichever trainer runs in it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness.instrument.clock import Clock
from benchmarks.harness.job import Job


def wait_for_turn(job: Job) -> None:
    """Return once the process may use the device."""
    if job.waits:
        while not Path(job.folder, "go").exists():
            time.sleep(0.05)


def cap_memory(job: Job) -> None:
    if job.memory_cap_gb is not None:
        device = int(os.environ.get("LOCAL_RANK", "0"))
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(job.memory_cap_gb * 1e9 / total, device)


def write_results(job: Job, clock: Clock, tokens: Sequence[tuple[int, int]], rank: int) -> None:
    """Write the steps so far. `tokens`: (all, in the completion) of each sequence that the first step trained."""
    results = {
        "steps": clock.steps,
        "tokens": sum(all_tokens for all_tokens, _ in tokens),
        "completion_tokens": sum(completion for _, completion in tokens),
    }
    file = Path(job.folder, f"rank{rank}.json")
    unfinished = file.with_suffix(".part")  # in case the process is ended while it writes
    unfinished.write_text(json.dumps(results))
    unfinished.replace(file)
