"""The reward of benchmarks/learn.py, as verl loads one: a file with the function compute_score."""

from __future__ import annotations

import json
from typing import Any

from templates.plugins.reasoning_task import score


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return score(solution_str, json.loads(ground_truth))
