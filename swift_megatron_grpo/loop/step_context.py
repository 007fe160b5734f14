"""The optimizer step in progress: the time and GPU memory of its phases, and its metrics."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch


def used_gpu_memory() -> float | None:
    """Return the GiB in use on this rank's GPU, by all processes and allocators; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


class PhaseTimer:
    """Sums the seconds of every `with timer("generation"): ...`; a phase may be entered several times."""

    def __init__(
        self,
        around: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        used_memory: Callable[[], float | None] = used_gpu_memory,
    ) -> None:
        self._around = around  # entered with each phase: the watchdog
        self._used_memory = used_memory
        self._memory: dict[str, float] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with self._around(phase):
                yield
        finally:
            self._seconds[phase] += time.perf_counter() - start
            used = self._used_memory()
            if used is not None:
                self._memory[phase] = max(used, self._memory.get(phase, 0.0))

    def seconds(self) -> dict[str, float]:
        return {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}

    def memory(self) -> dict[str, float]:
        """Return the GiB in use at the end of each phase, the most if it was entered several times."""
        return {f"memory/{phase}": used for phase, used in self._memory.items()}


@dataclass(frozen=True, slots=True)
class StepContext:
    """The optimizer step in progress, or the evaluation between two steps."""

    version: int  # of the trainer's weights: the optimizer steps behind them
    timer: PhaseTimer
    metrics: dict[str, float] = field(default_factory=dict)  # for the log
