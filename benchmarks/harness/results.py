"""Results of one run of the benchmark: the contents of its JSON file, and every number derived from them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ARMS = ("ours", "stock", "trl", "verl")
PEERS = ARMS[2:]  # trainers of other projects
NAMES = {"ours": "this package", "stock": "ms-swift", "trl": "TRL", "verl": "verl"}
TRAIN_PHASES = ("logprobs", "forward_backward", "grad_sync", "optimizer")
PHASES = ("generation", "switch", "weight_sync", "sync_check", "grading", *TRAIN_PHASES, "other")
SHARED = "+shared"  # in the name of a setting of this package: completions share their prompt
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # bf16 without sparsity, by part of the device's name


@dataclass(frozen=True)
class Step:
    """One optimizer step, over all ranks of a process group."""

    seconds: float  # of the slowest rank
    phases: dict[str, float]  # mean over ranks
    compute: list[float]  # [rank] forward and backward, before gradients are reduced
    peak_gb: dict[str, float]  # allocated in each phase, on the fullest rank
    reserved_gb: float
    loss: float
    grad_norm: float
    # Within peak_gb, on the fullest rank: vLLM's weights and cache, which PyTorch counts while vLLM sleeps and the GPU
    # has their memory back. None: not recorded, on a server, or in a vLLM that cannot sleep.
    vllm_gb: float | None = None
    # Cores of the machine that worked, on average. Other jobs ran during a step that has more than others.
    busy_cores: float | None = None
    # On the fullest rank, of NCCL, CUDA and vLLM, and of other processes on the GPU. None: not recorded.
    outside_gb: float | None = None
    allocator_retries: int | None = None  # of the rank with the most; each waits for the GPU

    @property
    def train_seconds(self) -> float:
        return math.fsum(self.phases.get(phase, 0.0) for phase in TRAIN_PHASES)

    @property
    def train_peak_gb(self) -> float:
        """Peak of the train phase, without a vLLM that sleeps."""
        return max(self.peak_gb.get(phase, 0.0) for phase in TRAIN_PHASES) - (self.vllm_gb or 0.0)


@dataclass(frozen=True)
class Process:
    """One start of a trainer with one setting."""

    arm: str
    setting: str
    status: str  # ok, out of memory, refused, failed
    steps: list[Step]  # without warm-up
    flags: list[str]


@dataclass(frozen=True)
class Run:
    """One invocation of bench.py: the trainers with every setting, alternating on one machine."""

    name: str
    kind: str  # train, step
    device: str
    ranks: int
    versions: dict[str, str]
    workload: dict[str, Any]
    prompt_tokens: int  # of all completions of a step
    completion_tokens: int
    flops: float  # of one step, with a prompt per completion
    memory_cap_gb: float | None
    pairs: list[list[str]]  # settings (ours, stock) compared in addition to equal settings and the best ones
    goal: str  # free text, shown next to the ratio
    flags: list[str]  # of `megatron rlhf`, for both of its trainers
    warm_up: int
    processes: list[Process]
    flops_with_shared_prompts: float | None = None  # of one step; None: no setting shares prompts
    flops_as_verl_counts: float | None = None  # of one step; None: not recorded, or verl has no formula
    allocator: str | None = None  # PYTORCH_CUDA_ALLOC_CONF of both Megatron trainers; None: not set

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Run:
        data = json.loads(path.read_text())
        data["processes"] = [
            Process(**{**process, "steps": [Step(**step) for step in process["steps"]]})
            for process in data["processes"]
        ]
        return cls(**data)

    def settings(self, arm: str) -> list[str]:
        return list(dict.fromkeys(process.setting for process in self.processes if process.arm == arm))

    def status(self, arm: str, setting: str) -> str:
        return self._processes(arm, setting)[0].status

    def measured(self, arm: str, setting: str) -> Measured:
        steps = [step for process in self._processes(arm, setting) for step in process.steps]
        return Measured(self, arm, setting, steps)

    def _processes(self, arm: str, setting: str) -> list[Process]:
        return [process for process in self.processes if (process.arm, process.setting) == (arm, setting)]

    def shared_and_repeated(self) -> list[tuple[Measured, Measured]]:
        """Return this package's settings that share prompts, each with the same setting without it."""
        settings = self.settings("ours")
        pairs = [(setting, setting.replace(SHARED, "")) for setting in settings if SHARED in setting]
        both = [(self.measured("ours", shared), self.measured("ours", repeated)) for shared, repeated in pairs]
        return [pair for pair in both if all(side.steps for side in pair)]

    def best(self, arm: str) -> Measured | None:
        """Return the fastest setting of a trainer, or None if none of its settings worked."""
        measured = [self.measured(arm, setting) for setting in self.settings(arm)]
        return min((one for one in measured if one.steps), key=lambda one: one.median, default=None)

    def comparisons(self) -> list[Comparison]:
        """Return all comparisons for which both settings have been measured."""
        pairs = []
        for setting in self.settings("ours"):
            if setting in self.settings("stock"):
                pairs.append(("equal flags", setting, setting))
        best, best_stock = self.best("ours"), self.best("stock")
        if best and best_stock:
            pairs.append(("each at its best", best.setting, best_stock.setting))
        pairs += [("chosen pair", setting, stock_setting) for setting, stock_setting in self.pairs]
        comparisons = [
            Comparison(what, self.measured("ours", setting), self.measured("stock", stock_setting))
            for what, setting, stock_setting in pairs
        ]
        peers = [self.best(arm) for arm in PEERS]
        comparisons += [Comparison("with a peer", best, peer) for peer in peers if best and peer]
        return [pair for pair in comparisons if pair.ours.steps and pair.other.steps]

    def compared_settings(self) -> list[tuple[str, str]]:
        """Return (arm, setting) of everything that a comparison uses, each once."""
        sides = [(side.arm, side.setting) for pair in self.comparisons() for side in (pair.ours, pair.other)]
        return list(dict.fromkeys(sides))


@dataclass(frozen=True)
class Measured:
    """All measured steps of one trainer with one setting."""

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

    @property
    def train_median(self) -> float:
        """Seconds of the train phase, also of a whole step."""
        return statistics.median(step.train_seconds for step in self.steps)

    def phase(self, *phases: str) -> float:
        return statistics.median(math.fsum(step.phases.get(phase, 0.0) for phase in phases) for step in self.steps)

    @property
    def peak_gb(self) -> float:
        """Peak memory of the train phase."""
        return max(step.train_peak_gb for step in self.steps)

    @property
    def tokens_per_second_per_device(self) -> float:
        return (self.run.prompt_tokens + self.run.completion_tokens) / self.median / self.run.ranks

    @property
    def mfu(self) -> float | None:
        """Model FLOPs of forward and backward divided by the peak FLOPs of the devices in that time.

        Where completions share their prompt, its FLOPs count once.
        """
        flops = self.run.flops_with_shared_prompts if SHARED in self.setting else self.run.flops
        return None if flops is None else self._utilization(flops)

    @property
    def mfu_as_verl_counts(self) -> float | None:
        """The same by verl's formula, which has none for shared prompts."""
        flops = None if SHARED in self.setting else self.run.flops_as_verl_counts
        return None if flops is None else self._utilization(flops)

    def _utilization(self, flops: float) -> float | None:
        peak = next((flops for name, flops in PEAK_FLOPS.items() if name in self.run.device), None)
        return None if peak is None else flops / self.phase("forward_backward", "grad_sync") / peak / self.run.ranks

    @property
    def imbalance(self) -> float:
        """Time of forward and backward: the slowest rank divided by the mean over ranks."""
        return statistics.median(max(step.compute) / statistics.fmean(step.compute) for step in self.steps)


@dataclass(frozen=True)
class Comparison:
    what: str
    ours: Measured
    other: Measured  # ms-swift's trainer, or a peer

    @property
    def ratio(self) -> float:
        return self.other.median / self.ours.median

    @property
    def train_ratio(self) -> float | None:
        """The same of the train phase; None: the other trainer does not report it."""
        return self.other.train_median / self.ours.train_median if self.other.train_median else None


def merge_ranks(ranks: Sequence[dict[str, Any]], warm_up: int) -> list[Step]:
    """Merge the result files of a process group's ranks into its steps, without warm-up."""
    return [_merge_step(step) for step in list(zip(*(rank["steps"] for rank in ranks), strict=False))[warm_up:]]


def _merge_step(ranks: Sequence[dict[str, Any]]) -> Step:
    phases = {phase for rank in ranks for phase in rank["phases"]}
    losses = [rank["loss"] for rank in ranks if rank["loss"] is not None]
    outside, retries = (
        [rank[name] for rank in ranks if rank[name] is not None] for name in ("outside_bytes", "allocator_retries")
    )
    vllm = max(ranks, key=lambda rank: max(rank["peak_bytes"].values()))["vllm_bytes"]
    return Step(
        seconds=round(max(rank["seconds"] for rank in ranks), 5),
        phases={
            phase: round(statistics.fmean(rank["phases"].get(phase, 0.0) for rank in ranks), 5)
            for phase in PHASES
            if phase in phases
        },
        compute=[round(rank["phases"]["forward_backward"], 5) for rank in ranks],
        peak_gb={
            phase: round(max(rank["peak_bytes"].get(phase, 0) for rank in ranks) / 1e9, 3)
            for phase in PHASES
            if phase in phases
        },
        reserved_gb=round(max(rank["reserved_bytes"] for rank in ranks) / 1e9, 3),
        loss=statistics.fmean(losses),
        grad_norm=ranks[0]["grad_norm"],
        vllm_gb=None if vllm is None else round(vllm / 1e9, 3),
        busy_cores=None if ranks[0]["busy_cores"] is None else round(ranks[0]["busy_cores"], 1),
        outside_gb=round(max(outside) / 1e9, 3) if outside else None,
        allocator_retries=max(retries, default=None),
    )
