"""Keeps mcore-bridge from waiting for the GPU for each weight that it exports.

It asks for each weight whether a pipeline stage adapts it, and passes the answer through a tensor on the GPU, so that
stages can reduce it. Making and reading that tensor waits until the GPU has finished everything before, some 25 times
a layer. With one stage there is nothing to reduce, because ranks that hold other experts have the same modules, and the
tensor can stay on the host.

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
import torch.distributed
from mcore_bridge import GPTBridge


def flags_on_host(bridge: GPTBridge) -> Callable[[], AbstractContextManager[None]]:
    """Return the context for the conversion of a layer. It must not be open while the exporting generator waits."""
    if bridge.pp_size > 1:
        return nullcontext
    of_classes = [vars(sys.modules[name]) for name in sorted({one.__module__ for one in type(bridge).__mro__})]
    imports = [
        (names, name)
        for names in of_classes
        for name, value in names.items()
        if isinstance(value, ModuleType) and value in _STAND_INS
    ]
    return partial(_replaced, imports)


class _StandIn:
    """A module as its importer sees it, with one function replaced."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        setattr(self, name, value)  # found without this method from now on
        return value


class _Torch(_StandIn):
    """Makes tensors of booleans on the host, whatever device is asked for."""

    @staticmethod
    def tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype, device="cpu" if dtype is torch.bool else device)


class _Distributed(_StandIn):
    """Leaves booleans on the host as they are, which are the same on all ranks."""

    @staticmethod
    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype is torch.bool and tensor.device.type == "cpu":
            return None
        return torch.distributed.all_reduce(tensor, *args, **kwargs)


_STAND_INS: dict[ModuleType, _StandIn] = {torch: _Torch(torch), torch.distributed: _Distributed(torch.distributed)}


@contextmanager
def _replaced(imports: list[tuple[dict[str, Any], str]]) -> Iterator[None]:
    """Put stand-ins in the place of imported modules: (names of the importing module, name of the import)."""
    # A TorchFunctionMode would do the same for torch, but it sees every call of a conversion, not only these.
    modules = [names[name] for names, name in imports]
    for (names, name), module in zip(imports, modules, strict=True):
        names[name] = _STAND_INS[module]
    try:
        yield
    finally:
        for (names, name), module in zip(imports, modules, strict=True):
            names[name] = module
