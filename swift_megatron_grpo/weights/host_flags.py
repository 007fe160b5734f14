"""Keeps mcore-bridge from waiting for the GPU for each weight that it exports.

It asks for each weight whether a pipeline stage adapts it, and passes the answer through a tensor on the GPU, so that
stages can reduce it. Making and reading that tensor waits until the GPU has finished everything before, some 25 times
a layer. With one stage there is nothing to reduce, and the tensor can stay on the host.

Tests: tests/dist/test_lora_export.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import torch
from mcore_bridge import GPTBridge


def flags_on_host(bridge: GPTBridge) -> Callable[[], AbstractContextManager[None]]:
    """Return the context for the conversion of a layer. It must not be open while the exporting generator waits."""
    if bridge.pp_size > 1 or bridge.ep_pp_size > 1:
        return nullcontext
    modules = [sys.modules[name] for name in sorted({one.__module__ for one in type(bridge).__mro__})]
    return partial(_with_flags_on_host, [module for module in modules if vars(module).get("torch") is torch])


class _TorchWithFlagsOnHost:
    """The module torch, except that it makes tensors of booleans on the host, whatever device is asked for."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        setattr(self, name, value)  # found without this method from now on
        return value

    @staticmethod
    def tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype, device="cpu" if dtype is torch.bool else device)


_TORCH = _TorchWithFlagsOnHost()


@contextmanager
def _with_flags_on_host(modules: list[ModuleType]) -> Iterator[None]:
    # A TorchFunctionMode would do the same, but it sees every call of a layer's conversion, not only these.
    for module in modules:
        vars(module)["torch"] = _TORCH
    try:
        yield
    finally:
        for module in modules:
            vars(module)["torch"] = torch
