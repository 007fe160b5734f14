"""Keeps mcore-bridge from waiting for the GPU for each weight that it exports.

It asks for each weight whether a pipeline stage adapts it, and passes the answer through a tensor on the GPU, so that
stages can reduce it. Making and reading that tensor waits until the GPU has finished everything before, some 25 times
a layer. With one stage there is nothing to reduce, because ranks that hold other experts have the same modules, and the
tensor can stay on the host.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from mcore_bridge import GPTBridge

from swift_megatron_grpo.runtime.replaced import replaced


def flags_on_host(bridge: GPTBridge) -> Callable[[], AbstractContextManager[None]]:
    """Return the context for the conversion of a layer. It must not be open while the exporting generator waits."""
    if bridge.pp_size > 1:
        return nullcontext
    stand_ins = {torch: _copy(torch, tensor=_tensor), torch.distributed: _copy(torch.distributed, all_reduce=_reduce)}
    modules = {sys.modules[one.__module__] for one in type(bridge).__mro__}
    imports = [
        (module, name, stand_ins[value])
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, ModuleType) and value in stand_ins
    ]

    @contextmanager
    def on_host() -> Iterator[None]:
        # A TorchFunctionMode would do the same for torch, but it sees every call of a conversion, not only these.
        with ExitStack() as replacements:
            for module, name, stand_in in imports:
                replacements.enter_context(replaced(module, name, stand_in))
            yield

    return on_host


def _copy(module: ModuleType, **changed: Any) -> ModuleType:
    copy = ModuleType(module.__name__)
    vars(copy).update(vars(module), **changed)
    return copy


def _tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    """Make tensors of booleans on the host, whatever device is asked for."""
    return torch.tensor(data, dtype=dtype, device="cpu" if dtype is torch.bool else device)


def _reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Leave booleans on the host as they are, which are the same on all ranks."""
    if tensor.dtype is torch.bool and tensor.device.type == "cpu":
        return None
    return torch.distributed.all_reduce(tensor, *args, **kwargs)
