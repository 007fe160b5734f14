"""Time and peak memory of each phase of a step. Every moment of a step belongs to exactly one phase.

The device is synchronized where one phase ends and the next begins, and nowhere else.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import psutil
import torch

from benchmarks.harness.instrument.vllm_pool import vllm_bytes
from swift_megatron_grpo.output.console.callback import retries_so_far

REST = "other"


def busy_core_seconds() -> float:
    """Return the time that the machine's cores have worked since it was started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def bytes_outside(vllm: int | None) -> int | None:
    """Return what the GPU holds in addition to PyTorch's memory, of all processes; None without a GPU.

    `vllm`: bytes of vLLM's pools. With some it is unknown: PyTorch counts them also while vLLM sleeps without them.
    """
    if not torch.cuda.is_available() or vllm is not None:
        return None
    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())


class Clock:
    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._phase: str | None = None  # None between steps, where nothing is counted
        self._since = 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._peaks: defaultdict[str, int] = defaultdict(int)
        self._reserved = 0

    @contextmanager
    def step(self) -> Iterator[dict[str, Any]]:
        """Measure one step; the yielded record contains its times after the step."""
        self._seconds.clear()
        self._peaks.clear()
        self._reserved = 0
        record: dict[str, Any] = {}
        self._start(REST)
        busy, retries = busy_core_seconds(), retries_so_far()
        yield record
        self.switch(None)
        busy, vllm = busy_core_seconds() - busy, vllm_bytes()
        record |= {
            "seconds": sum(self._seconds.values()),
            "phases": dict(self._seconds),
            "peak_bytes": dict(self._peaks),  # allocated in each phase
            "reserved_bytes": self._reserved,
            "outside_bytes": bytes_outside(vllm),
            "allocator_retries": retries_so_far() - retries,
            "vllm_bytes": vllm,  # within peak_bytes
            "busy_cores": busy / sum(self._seconds.values()),  # of the machine, with those of other jobs
        }
        self.steps.append(record)

    def switch(self, phase: str | None) -> None:
        """End the current phase and begin this one; do nothing between steps."""
        if self._phase is None:
            return
        torch.cuda.synchronize()
        self._seconds[self._phase] += time.perf_counter() - self._since
        self._peaks[self._phase] = max(self._peaks[self._phase], torch.cuda.max_memory_allocated())
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved())
        self._start(phase)

    def _start(self, phase: str | None) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._phase, self._since = phase, time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = self._phase
        self.switch(name)
        try:
            yield
        finally:
            self.switch(before)

    def timed(self, name: str, function: Callable[..., Any], then: str | None = None) -> Callable[..., Any]:
        """Return the function, timed as a phase; afterwards the previous phase resumes, or `then` begins."""

        @wraps(function)
        def timed_function(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                result = function(*args, **kwargs)
            if then is not None:
                self.switch(then)
            return result

        return timed_function

    def time_method(self, owner: Any, method: str, name: str, then: str | None = None) -> None:
        setattr(owner, method, self.timed(name, getattr(owner, method), then))
