"""One run of the benchmark: what its JSON file holds, and what follows from it. No number is made anywhere else."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ARMS = ("ours", "stock")
TRAIN_PHASES = ("logprobs", "forward_backward", "grad_sync", "optimizer")
PHASES = ("generation", "switch", "weight_sync", "grading", *TRAIN_PHASES, "other")
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # bf16 without sparsity, by part of the device's name


@dataclass(frozen=True)
class Step:
    """One optimizer step on all ranks of a process group."""

    seconds: float  # of the slowest rank
    phases: dict[str, float]  # mean over ranks
    compute: list[float]  # [rank] forward and backward before gradients are exchanged
    peak_gb: dict[str, float]  # allocated in each phase, on the fullest rank
    reserved_gb: float
    loss: float
    grad_norm: float

    @property
    def train_seconds(self) -> float:
        return sum(self.phases.get(phase, 0.0) for phase in TRAIN_PHASES)

    @property
    def train_peak_gb(self) -> float:
        return max(self.peak_gb.get(phase, 0.0) for phase in TRAIN_PHASES)


@dataclass(frozen=True)
class Process:
    """One start of `megatron rlhf`."""

    arm: str
    setting: str
    status: str  # ok, out of memory, refused, failed
    steps: list[Step]  # without warm-up
    flags: list[str]


@dataclass(frozen=True)
class Run:
    """One invocation of bench.py: both arms, every setting, interleaved, on one machine."""

    name: str
    kind: str  # train, step
    device: str
    ranks: int
    versions: dict[str, str]
    workload: dict[str, Any]
    prompt_tokens: int  # of all completions of a step
    completion_tokens: int
    flops: float  # that one step needs
    memory_cap_gb: float | None
    pairs: list[list[str]]  # settings (ours, stock) compared besides equal ones and each arm's best
    goal: str  # free text, beside the ratio
    flags: list[str]  # of both arms
    warm_up: int
    processes: list[Process]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Run:
        data = json.loads(path.read_text())
        data["processes"] = [
            Process(**{**each, "steps": [Step(**step) for step in each["steps"]]}) for each in data["processes"]
        ]
        return cls(**data)

    def settings(self, arm: str) -> list[str]:
        return list(dict.fromkeys(each.setting for each in self.processes if each.arm == arm))

    def status(self, arm: str, setting: str) -> str:
        return next(each.status for each in self.processes if (each.arm, each.setting) == (arm, setting))

    def measured(self, arm: str, setting: str) -> Measured:
        mine = [each for each in self.processes if (each.arm, each.setting) == (arm, setting)]
        return Measured(self, arm, setting, [step for each in mine for step in each.steps])

    def best(self, arm: str) -> Measured | None:
        """The fastest setting, by what this kind of run is about."""
        all_of_them = [self.measured(arm, setting) for setting in self.settings(arm)]
        return min((each for each in all_of_them if each.steps), key=lambda each: each.median, default=None)

    def comparisons(self) -> list[Comparison]:
        found = []
        for setting in self.settings("ours"):
            if setting in self.settings("stock"):
                found.append(("equal flags", setting, setting))
        ours, stock = self.best("ours"), self.best("stock")
        if ours and stock:
            found.append(("each at its best", ours.setting, stock.setting))
        found += [("chosen pair", mine, theirs) for mine, theirs in self.pairs]
        sides = [(what, self.measured("ours", mine), self.measured("stock", theirs)) for what, mine, theirs in found]
        return [Comparison(what, mine, theirs) for what, mine, theirs in sides if mine.steps and theirs.steps]


@dataclass(frozen=True)
class Measured:
    """All measured steps of one arm at one setting."""

    run: Run
    arm: str
    setting: str
    steps: list[Step]

    @property
    def seconds(self) -> list[float]:
        if self.run.kind == "step":
            return [step.seconds for step in self.steps]
        return [step.train_seconds for step in self.steps]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def phase(self, *phases: str) -> float:
        return statistics.median(sum(step.phases.get(phase, 0.0) for phase in phases) for step in self.steps)

    @property
    def peak_gb(self) -> float:
        """Of the train phase."""
        return max(step.train_peak_gb for step in self.steps)

    @property
    def tokens_per_second_per_device(self) -> float:
        return (self.run.prompt_tokens + self.run.completion_tokens) / self.median / self.run.ranks

    @property
    def mfu(self) -> float | None:
        """Of forward and backward: what the model needs, by what the chips could do in that time."""
        peak = next((flops for name, flops in PEAK_FLOPS.items() if name in self.run.device), None)
        if peak is None:
            return None
        return self.run.flops / self.phase("forward_backward", "grad_sync") / peak / self.run.ranks

    @property
    def imbalance(self) -> float:
        """Largest over mean of the ranks' own forward and backward."""
        return statistics.median(max(step.compute) / statistics.fmean(step.compute) for step in self.steps)


@dataclass(frozen=True)
class Comparison:
    what: str
    ours: Measured
    stock: Measured

    @property
    def ratio(self) -> float:
        return self.stock.median / self.ours.median


def merge_ranks(ranks: Sequence[dict[str, Any]], warm_up: int) -> list[Step]:
    """Files of the ranks of one process group -> its steps after the warm-up."""
    return [_merge_step(of_ranks) for of_ranks in list(zip(*(rank["steps"] for rank in ranks), strict=False))[warm_up:]]


def _merge_step(of_ranks: Sequence[dict[str, Any]]) -> Step:
    phases = {phase for each in of_ranks for phase in each["phases"]}
    losses = [each["loss"] for each in of_ranks if each["loss"] is not None]
    return Step(
        seconds=round(max(each["seconds"] for each in of_ranks), 5),
        phases={
            phase: round(statistics.fmean(each["phases"].get(phase, 0.0) for each in of_ranks), 5)
            for phase in PHASES
            if phase in phases
        },
        compute=[round(each["phases"]["forward_backward"], 5) for each in of_ranks],
        peak_gb={
            phase: round(max(each["peak_bytes"].get(phase, 0) for each in of_ranks) / 1e9, 3)
            for phase in PHASES
            if phase in phases
        },
        reserved_gb=round(max(each["reserved_bytes"] for each in of_ranks) / 1e9, 3),
        loss=statistics.fmean(losses),
        grad_norm=of_ranks[0]["grad_norm"],
    )
