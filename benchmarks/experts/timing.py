"""Times of one forward and backward on the host and on the GPU, and the kernels that they launch.

The head of bench_experts.py describes the fields.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch


@dataclass(frozen=True)
class Pass:
    """A forward, the gradients of what it returns, and the leaves that get gradients."""

    forward: Callable[[], list[torch.Tensor]]
    upstream: list[torch.Tensor]
    leaves: list[torch.Tensor]

    def drop_gradients(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def backward(self, outputs: list[torch.Tensor]) -> None:
        torch.autograd.backward(outputs, self.upstream)

    def run(self) -> None:
        self.drop_gradients()
        self.backward(self.forward())


def timed(measured: Pass, repeats: int, gpu: bool) -> dict[str, float | None]:
    """Return the median times of forward and backward, and the mean time of repetitions in a row."""
    for _ in range(3):
        measured.run()
    on_host = [host_times(measured, gpu) for _ in range(repeats)]
    wait(gpu)
    start = time.perf_counter()
    for _ in range(repeats):
        measured.run()
    wait(gpu)
    loop_ms = 1e3 * (time.perf_counter() - start) / repeats
    on_gpu: list[tuple[float, float]] = []
    if gpu:
        forwards, backwards = zip(*on_host, strict=True)
        ahead = 1.5 * (max(forwards) + max(backwards)) + 1
        on_gpu = [gpu_times(measured, ahead) for _ in range(repeats)]
    return {
        "host_forward_ms": median(forward for forward, _ in on_host),
        "host_backward_ms": median(backward for _, backward in on_host),
        "loop_ms": loop_ms,
        "gpu_forward_ms": median(forward for forward, _ in on_gpu) if gpu else None,
        "gpu_backward_ms": median(backward for _, backward in on_gpu) if gpu else None,
    }


def host_times(measured: Pass, gpu: bool) -> tuple[float, float]:
    """Return the milliseconds until forward and backward are enqueued, the GPU's queue being empty before."""
    measured.drop_gradients()
    wait(gpu)
    start = time.perf_counter()
    outputs = measured.forward()
    middle = time.perf_counter()
    measured.backward(outputs)
    end = time.perf_counter()
    return 1e3 * (middle - start), 1e3 * (end - middle)


def gpu_times(measured: Pass, ahead: float) -> tuple[float, float]:
    """Return the milliseconds of forward and backward on the GPU, which first sleeps for `ahead` ms.

    Meanwhile the host enqueues all.
    """
    measured.drop_gradients()
    wait(True)
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda._sleep(int(ahead * 2e6))  # cycles, of at most 2 GHz
    start.record()
    outputs = measured.forward()
    middle.record()
    measured.backward(outputs)
    end.record()
    wait(True)
    return start.elapsed_time(middle), middle.elapsed_time(end)


def wait(gpu: bool) -> None:
    if gpu:
        torch.cuda.synchronize()


def kernels_of(measured: Pass) -> list[dict[str, Any]]:
    """Return name, launches and total microseconds of the 12 kernels that take longest."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        measured.run()
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = {}
    for event in profiled.events() or ():
        if event.device_type == DeviceType.CUDA:
            totals.setdefault(event.name, []).append(event.time_range.elapsed_us())
    kernels = [(round(sum(us), 1), len(us), name[:160]) for name, us in totals.items()]
    kernels.sort(reverse=True)
    return [{"name": name, "launches": launches, "us": us} for us, launches, name in kernels[:12]]
