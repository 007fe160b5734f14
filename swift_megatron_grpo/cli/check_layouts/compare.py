"""Results of a layout, and their differences from one rank."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from swift_megatron_grpo.cli.command_line import Refused


@dataclass(frozen=True)
class Run:
    """Results of one layout."""

    layout: str
    metrics: list[dict[str, float]]  # of each step
    weights: str  # file with every weight after the steps, under the checkpoint's names


@dataclass(frozen=True)
class Difference:
    """Largest differences between a layout and one rank."""

    layout: str
    loss: float  # absolute
    grad_norm: float  # relative
    weights: float  # absolute, the largest of all
    seconds: float

    @property
    def worst(self) -> float:
        values = (self.loss, self.grad_norm, self.weights)
        return math.inf if any(math.isnan(v) for v in values) else max(values)


def compare(name: str, folder: str) -> Difference:
    """Compare the results of a layout with those of one rank."""
    import torch

    run, reference = (json.loads(Path(folder, f"{layout}.json").read_text()) for layout in (name, "one"))
    pairs = list(zip(run["metrics"], reference["metrics"], strict=True))
    weights, expected = torch.load(run["weights"]), torch.load(reference["weights"])
    if set(weights) != set(expected):
        raise Refused(f"{name}: weights differ from those of one rank: {sorted(set(weights) ^ set(expected))[:5]}")
    return Difference(
        layout=name,
        loss=max(abs(a[key] - b[key]) for a, b in pairs for key in b if key != "grad_norm"),
        grad_norm=max(abs(a["grad_norm"] - b["grad_norm"]) / b["grad_norm"] for a, b in pairs),
        weights=max((weights[key] - expected[key]).abs().max().item() for key in expected),
        seconds=run["seconds"],
    )
