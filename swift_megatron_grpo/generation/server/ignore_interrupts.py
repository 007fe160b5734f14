"""SIGINT ends nothing but the web server, which then ends the engine in order.

Ctrl-C sends SIGINT to every process of the server. vLLM's processes end at it by themselves, whatever handler they
inherit; one that ends before the web server closes the engine looks like a failure, and vLLM logs a traceback about it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from importlib import import_module
from typing import Any

# The functions that vLLM's processes run. A version of vLLM without one of them has no such process.
ENTRIES = (
    ("vllm.v1.engine.core", "EngineCoreProc", "run_engine_core"),
    ("vllm.v1.engine.coordinator", "DPCoordinatorProc", "run_coordinator"),
    ("vllm.v1.executor.multiproc_executor", "WorkerProc", "worker_main"),
)
_entries: dict[tuple[str, str, str], Callable[..., Any]] = {}  # vLLM's own


class _Uninterrupted:
    """One of vLLM's functions. It is sent to a new process by name, because vLLM may spawn instead of fork."""

    def __init__(self, entry: tuple[str, str, str]) -> None:
        self._entry = entry

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ignore_interrupts()
        return _entries[self._entry](*args, **kwargs)


def ignore_interrupts() -> None:
    """Ignore SIGINT from now on, in this process and in all of vLLM's that it starts. Idempotent."""
    if not isinstance(signal.signal, _KeepIgnored):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal = _KeepIgnored(signal.signal)  # type: ignore[assignment]
    for entry in ENTRIES:
        module_name, class_name, name = entry
        try:
            owner = getattr(import_module(module_name), class_name)
            function = getattr(owner, name)
        except (ImportError, AttributeError):
            continue
        if not isinstance(function, _Uninterrupted):
            _entries[entry] = function
            setattr(owner, name, _Uninterrupted(entry))


class _KeepIgnored:
    """`signal.signal` without effect on SIGINT: vLLM sets its own handlers, for it and for SIGTERM."""

    def __init__(self, set_handler: Callable[..., Any]) -> None:
        self._set_handler = set_handler

    def __call__(self, number: int, handler: Any) -> Any:
        return signal.SIG_IGN if number == signal.SIGINT else self._set_handler(number, handler)
