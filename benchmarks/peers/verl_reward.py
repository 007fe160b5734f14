"""The benchmark's reward, as verl loads one: a file with the function compute_score."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.workload import reward_of


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return reward_of(solution_str)
