"""A process that is ended at its limit keeps the steps that it has made."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import processes
from benchmarks.harness.instrument.clock import Clock
from benchmarks.harness.instrument.process import write_results
from benchmarks.harness.job import Job
from benchmarks.harness.processes import NOT_FINISHED, SMALLER_BUDGET, Plan, Setting

SETTING = Setting("ours", "tokens16", ())
STEP: dict[str, Any] = {
    "seconds": 2.0, "phases": {"forward_backward": 2.0}, "peak_bytes": {"forward_backward": 1e9}, "reserved_bytes": 2e9,
    "vllm_bytes": None, "busy_cores": 1.0, "outside_bytes": None, "allocator_retries": 0, "loss": 0.5, "grad_norm": 1.0,
}  # fmt: skip


def plan_of_two_ranks(folder: Path) -> Plan:
    job = Job("ours", True, str(folder), [4], [[3, 3]], 100, 0, None, [], False, None, False, False)
    return Plan(job, {}, 2, 1, 3, 1, 60.0, False, folder, False, False, 1, 0.0)


def write(plan: Plan, steps_of_ranks: list[int]) -> None:
    for rank, steps in enumerate(steps_of_ranks):
        clock = Clock()
        clock.steps = [STEP] * steps
        write_results(plan.job, clock, [(7, 3), (7, 3)], rank)


def ended_at_its_limit(folder: Path, log: str = "") -> str:
    """Return the status of a process that sleeps."""
    (folder / "log.txt").write_text(f"{log}\n")
    return processes._wait(subprocess.Popen(["sleep", "60"], start_new_session=True), 0.1, folder)


@pytest.mark.parametrize(("steps_of_ranks", "measured"), [([3, 3], 2), ([3, 2], 1), ([3, 1], 0), ([3], 0)])
def test_a_process_that_is_ended_after_its_warm_up_is_measured(
    tmp_path: Path, steps_of_ranks: list[int], measured: int
) -> None:
    plan = plan_of_two_ranks(tmp_path)
    write(plan, steps_of_ranks)
    status = ended_at_its_limit(tmp_path)
    assert status == f"{NOT_FINISHED} 0.1 s"
    process = processes._collect(plan, SETTING, tmp_path, status)
    assert (process.status, len(process.steps)) == ("ok" if measured else status, measured)


def test_a_process_that_has_failed_or_lowered_its_budget_is_not_measured(tmp_path: Path) -> None:
    plan = plan_of_two_ranks(tmp_path)
    write(plan, [3, 3])
    lowered = ended_at_its_limit(tmp_path, f"the step needs more: {SMALLER_BUDGET} 8192")
    assert lowered == "out of memory"
    for status in ("failed: exit code 1", lowered):
        process = processes._collect(plan, SETTING, tmp_path, status)
        assert (process.status, process.steps) == (status, [])
