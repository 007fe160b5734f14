"""The part of torch.cuda that does not need a GPU: one device, one stream that is never behind, the CPU's generator.

For `activate()`. torch.cuda.is_available() stays False: vLLM, transformers and ms-swift choose the CPU by it. What would
describe a GPU (properties, capability, name) raises, as it does in torch's own CPU build, and whatever is not listed here
keeps raising too.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import psutil
import torch

from swift_megatron_grpo.platforms.cpu.devices import CPU


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._recorded_at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._recorded_at = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        return (end_event._recorded_at - self._recorded_at) * 1000

    def query(self) -> bool:
        return True

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...


class Stream:
    """Work is done when the call that asked for it returns, so there is nothing to wait for."""

    device = CPU
    cuda_stream = 0
    stream_id = 0

    def __init__(self, device: Any = None, priority: int = 0) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def wait_event(self, event: Event) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...

    def synchronize(self) -> None: ...


_STREAM = Stream()


class _Device(nullcontext):  # type: ignore[type-arg]
    """torch.cuda.device(index)"""


class _CpuGenerator:
    """torch.cuda.default_generators[0]: torch's CPU generator.

    The graph-safe methods are there for megatron-core's `te_rng_tracker`, which asks for them although no graph is captured;
    a state is a tensor here and not a generator.
    """

    initial_seed = staticmethod(torch.default_generator.initial_seed)
    manual_seed = staticmethod(torch.default_generator.manual_seed)
    seed = staticmethod(torch.default_generator.seed)
    get_state = clone_state = graphsafe_get_state = staticmethod(torch.default_generator.get_state)
    set_state = graphsafe_set_state = staticmethod(torch.default_generator.set_state)


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _call(callback: Callable[[], None], **kwargs: Any) -> None:
    callback()


def _no_gpu(*args: Any, **kwargs: Any) -> Any:
    # AssertionError is what torch's CPU build raises here, and what callers that can do without a GPU expect.
    raise AssertionError("there is no GPU to describe: this process runs on the CPU platform")


def _stream_context(stream: Stream | None) -> AbstractContextManager[None]:
    return nullcontext()


def _memory_stats(device: Any = None) -> dict[str, int]:
    return defaultdict(int)


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


_REPLACEMENTS: dict[str, Any] = {
    "Event": Event,
    "ExternalStream": Stream,
    "Stream": Stream,
    "_lazy_call": _call,
    "_lazy_init": _nothing,
    "current_device": lambda: 0,
    "current_stream": lambda device=None: _STREAM,
    "default_generators": (_CpuGenerator(),),
    "default_stream": lambda device=None: _STREAM,
    "device": _Device,
    "device_count": lambda: 1,
    "empty_cache": _nothing,
    "get_device_capability": _no_gpu,
    "get_device_name": _no_gpu,
    "get_device_properties": _no_gpu,
    "init": _nothing,
    "ipc_collect": _nothing,
    "is_current_stream_capturing": lambda: False,
    "max_memory_allocated": lambda device=None: 0,
    "max_memory_reserved": lambda device=None: 0,
    "mem_get_info": _mem_get_info,
    "memory_allocated": lambda device=None: 0,
    "memory_reserved": lambda device=None: 0,
    "memory_stats": _memory_stats,
    "reset_max_memory_allocated": _nothing,
    "reset_max_memory_cached": _nothing,
    "reset_peak_memory_stats": _nothing,
    "set_device": _nothing,
    "set_stream": _nothing,
    "stream": _stream_context,
    "synchronize": _nothing,
}
# torch.cuda.random takes these from torch.cuda when it is imported.
_IN_RANDOM = ("_lazy_call", "_lazy_init", "current_device", "device_count")
_IN_NVTX = ("mark", "range_end", "range_pop", "range_push", "range_start")


def install() -> None:
    for name, replacement in _REPLACEMENTS.items():
        setattr(torch.cuda, name, replacement)
    for name in _IN_RANDOM:
        setattr(torch.cuda.random, name, _REPLACEMENTS[name])
    for name in _IN_NVTX:
        setattr(torch.cuda.nvtx, name, _nothing)
