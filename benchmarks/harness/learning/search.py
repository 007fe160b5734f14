"""The choice of learning rate and group size, on other problems than those of the page. Pure.

`learn try` trains this package with one candidate and one seed, and `learn choose` compares them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

CHOICE = "learning-choice.json"
CHOSEN = ("learning_rate", "generations")  # fields of Settings
LEARNING_RATES, GROUPS = (5e-6, 1e-5, 2e-5), (8, 16)
STEPS, SAVE_EVERY, SEED = 150, 50, 4
TIMED_STEPS = 60


def mean_accuracy(run: dict[str, Any]) -> float:
    """Return the mean held-out accuracy of the weights after training began."""
    return statistics.fmean(point["accuracy"] for point in run["held_out"] if point["step"])


def choose(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the candidate with the highest mean held-out accuracy, and all of them."""
    candidates = [
        {name: run["settings"][name] for name in CHOSEN}
        | {
            "accuracies": {point["step"]: point["accuracy"] for point in run["held_out"]},
            "mean": round(mean_accuracy(run), 4),
        }
        for run in runs
    ]
    best = max(candidates, key=lambda candidate: candidate["mean"])
    return {name: best[name] for name in CHOSEN} | {
        "device": sorted({run["device"] for run in runs}),
        "problems": runs[0]["held_out"][0]["problems"],
        "candidates": sorted(candidates, key=lambda candidate: [candidate[name] for name in CHOSEN]),
    }
