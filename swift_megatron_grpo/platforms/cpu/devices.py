"""Wherever torch is asked for a CUDA device, it takes the CPU.

For `activate()`. The mechanism is the one of torch.set_default_device: a TorchFunctionMode sees every call of torch's
API before it runs and rewrites the device in its arguments. torch's own functions stay what they are, so
torch.jit.script and pickling keep working. Modes belong to a thread, so every thread that starts later enters one too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def is_cuda(device: object) -> bool:
    """Whether `device`, as torch's API takes devices, means a CUDA device."""
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _device(*args: Any, **kwargs: Any) -> torch.device:
    """torch.device("cuda", 0), torch.device(0), torch.device(type="cuda"), torch.device(device="cuda:0")"""
    named = next(iter(args), kwargs.get("type", kwargs.get("device")))
    return CPU if is_cuda(named) else torch.device(*args, **kwargs)


def _first_argument(function: Callable[..., Any], skip: int) -> Callable[..., Any]:
    """`function` with its positional argument number `skip` redirected where it is a device."""

    def redirected(*args: Any, **kwargs: Any) -> Any:
        if len(args) > skip and is_cuda(args[skip]):
            args = (*args[:skip], CPU, *args[skip + 1 :])
        return function(*args, **redirect(kwargs))

    return redirected


def _same_tensor(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Tensor.cuda and Tensor.pin_memory: the tensor is where it should be."""
    return tensor


def redirect(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same keyword arguments with the CPU in place of a CUDA device and without pinned memory."""
    if "device" in kwargs and is_cuda(kwargs["device"]):
        kwargs = {**kwargs, "device": CPU}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    return kwargs


_IN_PLACE_OF: dict[Any, Callable[..., Any]] = {
    torch.device: _device,
    torch._C._nn._parse_to: _first_argument(torch._C._nn._parse_to, skip=0),  # Module.to
    torch.Tensor.to: _first_argument(torch.Tensor.to, skip=1),
    torch.Tensor.cuda: _same_tensor,
    torch.Tensor.pin_memory: _same_tensor,
}


class CudaToCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        function = _IN_PLACE_OF.get(func, func)
        return function(*args, **redirect(kwargs)) if kwargs else function(*args)


def install() -> None:
    CudaToCpu().__enter__()  # for the rest of the process
    _redirect_new_threads()
    _redirect_backward()
    # Checkpoints written on a GPU, and torch.load(..., map_location="cuda").
    torch.serialization.register_package(0, lambda storage: None, _load_on_cpu)


def _redirect_new_threads() -> None:
    start = threading.Thread.start

    def start_redirected(thread: threading.Thread) -> None:
        run = thread.run

        def run_redirected() -> None:
            del thread.run  # the thread would hold itself
            with CudaToCpu():
                run()

        thread.run = run_redirected  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = start_redirected  # type: ignore[assignment, method-assign]


def _redirect_backward() -> None:
    """A mode is off while it handles a call. A call of .backward() runs anybody's functions: there it is on again."""
    run_backward = torch.autograd._engine_run_backward

    def run_backward_redirected(*args: Any, **kwargs: Any) -> Any:
        with CudaToCpu():
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = run_backward_redirected


def _load_on_cpu(storage: Any, location: str) -> Any:
    return storage if is_cuda(location) else None
