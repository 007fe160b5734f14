"""Keeps mcore-bridge from waiting for the GPU for each weight that it exports.

It asks for each weight whether a pipeline stage adapts it, and passes the answer through a tensor on the GPU, so that
stages can reduce it. Making and reading that tensor waits until the GPU has finished everything before, some 25 times
a layer. With one stage there is nothing to reduce, and the tensor can stay on the host.

Tests: tests/dist/test_lora_export.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from mcore_bridge import GPTBridge
from torch.overrides import TorchFunctionMode


def flags_on_host(bridge: GPTBridge) -> Callable[[], AbstractContextManager[Any]]:
    """Return the context for the conversion of a layer. It must not be open while the exporting generator waits."""
    return _FlagsOnHost if bridge.pp_size == 1 and bridge.ep_pp_size == 1 else nullcontext


class _FlagsOnHost(TorchFunctionMode):
    """Makes tensors of booleans on the host inside the context, whatever device is asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("dtype") is torch.bool:
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)
