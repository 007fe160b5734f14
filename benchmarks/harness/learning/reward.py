"""The reward of TRL and verl, which loads this file; ms-swift's is `sum` of instrument/sums.py. Pure."""

from __future__ import annotations

import re
from typing import Any


def score(text: str, solution: str) -> float:
    """Return 1 if the last number of a completion is the solution, and 0 otherwise."""
    return float(re.findall(r"-?\d+", text)[-1:] == [solution])


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return score(solution_str, ground_truth)
