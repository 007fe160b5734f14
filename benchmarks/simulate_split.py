"""Compute which share of a run's GPUs the rollout servers should have, with generation ahead of training.

    python -m benchmarks.simulate_split

Times are in units of the train phase on all GPUs. A server has one GPU. Generation on fewer GPUs gives each engine more
completions at a time, by which a decoding step gets slower or, while the host is the limit, does not: `growth` is the
share of its time that is proportional to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness.markdown import lines_of

GPUS = (2, 4, 8)
RATIOS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
GROWTHS = (0.25, 0.75)
SWITCH = 0.2  # of colocation: vLLM sleeps and wakes; 0.27 s for a train phase of 1.46 s (step-verl-1.7b.json, an H200)
SYNC = 0.05  # weights to a server, during which it does not generate


@dataclass(frozen=True)
class Phases:
    """The phases of a step in which all GPUs generate and then all train."""

    generation: float  # as a multiple of the train phase
    growth: float

    def colocated(self) -> float:
        return self.generation + 1 + SWITCH

    def split(self, gpus: int, servers: int) -> float:
        generation = self.generation * (1 - self.growth + self.growth * gpus / servers)
        return max(generation, gpus / (gpus - servers)) + SYNC

    def best_split(self, gpus: int) -> int:
        return min(range(1, gpus), key=lambda servers: self.split(gpus, servers))


def table() -> str:
    """Return the table in Markdown: servers and the gain over colocation, for each ratio, growth and number of GPUs."""
    columns = [(growth, gpus) for growth in GROWTHS for gpus in GPUS]
    head = ["generation / training", *(f"{gpus} GPUs, growth {growth:g}" for growth, gpus in columns)]
    lines = [head]
    for ratio in RATIOS:
        cells = [f"{ratio:g}"]
        for growth, gpus in columns:
            phases = Phases(ratio, growth)
            servers = phases.best_split(gpus)
            cells.append(f"{servers}: {phases.colocated() / phases.split(gpus, servers):.2f}")
        lines.append(cells)
    return lines_of(lines)


if __name__ == "__main__":
    print(table())
