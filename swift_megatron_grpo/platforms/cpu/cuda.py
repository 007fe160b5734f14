"""The part of torch.cuda that does not need a GPU: one device, one synchronous stream, the CPU's random generator.

Installed by `activate()`. torch.cuda.is_available() stays False, because vLLM, transformers and ms-swift use it to
select the CPU. Functions that describe a GPU (properties, capability, name) raise, as in torch's own CPU build, and so
does everything that is not listed here. torch's CUDA build, which plain `pip install torch` installs, works as well.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NoReturn

import psutil
import torch

from swift_megatron_grpo.platforms.cpu.devices import CPU


class Event:
    """torch.cuda.Event, which measures wall-clock time."""

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
    """torch.cuda.Stream. All work is synchronous, so that there is nothing to wait for."""

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


class _CpuGenerator:
    """torch.cuda.default_generators[0]: torch's CPU generator.

    The graph-safe methods exist for megatron-core's `te_rng_tracker`, which calls them although no graph is captured.
    Here a state is a tensor, not a generator.
    """

    initial_seed = staticmethod(torch.default_generator.initial_seed)
    manual_seed = staticmethod(torch.default_generator.manual_seed)
    seed = staticmethod(torch.default_generator.seed)
    get_state = clone_state = graphsafe_get_state = staticmethod(torch.default_generator.get_state)
    set_state = graphsafe_set_state = staticmethod(torch.default_generator.set_state)


_REPLACEMENTS: dict[str, Any] = {
    "Event": Event,
    "ExternalStream": Stream,
    "Stream": Stream,
    "_lazy_call": lambda callback, **kwargs: callback(),
    "current_device": lambda: 0,
    "current_stream": lambda device=None: _STREAM,
    "default_generators": (_CpuGenerator(),),
    "default_stream": lambda device=None: _STREAM,
    "device": nullcontext,
    "device_count": lambda: 1,
    "is_available": lambda: False,  # with PYTORCH_NVML_BASED_CUDA_CHECK torch's CUDA build asks device_count
    "is_current_stream_capturing": lambda: False,
    "max_memory_allocated": lambda device=None: 0,
    "max_memory_reserved": lambda device=None: 0,
    "mem_get_info": lambda device=None: (psutil.virtual_memory().available, psutil.virtual_memory().total),
    "memory_allocated": lambda device=None: 0,
    "memory_reserved": lambda device=None: 0,
    "memory_stats": lambda device=None: defaultdict(int),
    "stream": lambda stream: nullcontext(),
}
_WITHOUT_EFFECT = (
    "_lazy_init", "empty_cache", "init", "ipc_collect", "reset_max_memory_allocated", "reset_max_memory_cached",
    "reset_peak_memory_stats", "set_device", "set_stream", "synchronize",
)  # fmt: skip
_ABOUT_A_GPU = ("get_device_capability", "get_device_name", "get_device_properties")
_TRACE_MARKS = ("mark", "range_end", "range_pop", "range_push", "range_start")
# torch.cuda.random has its own references to these functions.
_USED_BY_RANDOM = ("_lazy_call", "_lazy_init", "current_device", "device_count")


def install() -> None:
    for name, replacement in _REPLACEMENTS.items():
        setattr(torch.cuda, name, replacement)
    for name in _WITHOUT_EFFECT:
        setattr(torch.cuda, name, _do_nothing(name))
    for name in _ABOUT_A_GPU:
        setattr(torch.cuda, name, _refuse(name))
    for name in _TRACE_MARKS:
        setattr(torch.cuda.nvtx, name, _do_nothing(name))
    for name in _USED_BY_RANDOM:
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    # Cannot be done by the mode of devices.py: torch's argument parser rejects our streams before it calls the mode.
    torch.Tensor.record_stream = _do_nothing("record_stream")  # type: ignore[method-assign]


# A separate function for every name: torch._dynamo distinguishes functions by identity.


def _do_nothing(name: str) -> Callable[..., None]:
    def nothing(*args: Any, **kwargs: Any) -> None: ...

    nothing.__name__ = nothing.__qualname__ = name
    return nothing


def _refuse(name: str) -> Callable[..., NoReturn]:
    def no_gpu(*args: Any, **kwargs: Any) -> NoReturn:
        # torch's CPU build raises AssertionError here, and callers that also work without a GPU expect it.
        raise AssertionError(f"torch.cuda.{name} needs a GPU, but this process runs on the CPU platform")

    return no_gpu
