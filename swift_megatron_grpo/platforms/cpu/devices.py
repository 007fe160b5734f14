"""Redirection of CUDA devices: wherever torch receives a CUDA device, it uses the CPU.

Installed by `activate()`. The mechanism is that of torch.set_default_device: a TorchFunctionMode intercepts every call
of torch's API and rewrites the device in its arguments. torch's own functions are not replaced, so that
torch.jit.script and pickling keep working. A mode applies to one thread, so every thread that starts later enters one.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def is_cuda(device: object) -> bool:
    """Return True if `device`, in any form that torch's API accepts, is a CUDA device."""
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _device(*args: Any, **kwargs: Any) -> torch.device:
    """Replace torch.device, for example torch.device("cuda", 0), torch.device(0) and torch.device(type="cuda")."""
    device = next(iter(args), kwargs.get("type", kwargs.get("device")))
    return CPU if is_cuda(device) else torch.device(*args, **kwargs)


def _redirect_argument(function: Callable[..., Any], skip: int) -> Callable[..., Any]:
    """Wrap `function`: redirect the positional argument after the first `skip` if it is a CUDA device."""

    def redirected(*args: Any, **kwargs: Any) -> Any:
        if len(args) > skip and is_cuda(args[skip]):
            args = (*args[:skip], CPU, *args[skip + 1 :])
        return function(*args, **redirect(kwargs))

    return redirected


def _same_tensor(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replace Tensor.cuda and Tensor.pin_memory: the tensor is already in the right place."""
    return tensor


def redirect(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments with the CPU in place of a CUDA device and without pinned memory."""
    if "device" in kwargs and is_cuda(kwargs["device"]):
        kwargs = {**kwargs, "device": CPU}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    return kwargs


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    torch.device: _device,
    torch._C._nn._parse_to: _redirect_argument(torch._C._nn._parse_to, skip=0),  # Module.to
    torch.Tensor.to: _redirect_argument(torch.Tensor.to, skip=1),
    torch.Tensor.cuda: _same_tensor,
    torch.Tensor.pin_memory: _same_tensor,
}


class CudaToCpu(TorchFunctionMode):
    """A mode in which calls of torch's API use the CPU in place of a CUDA device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        function = _REPLACEMENTS.get(func, func)
        return function(*args, **redirect(kwargs)) if kwargs else function(*args)


def install() -> None:
    CudaToCpu().__enter__()  # never exited
    _redirect_new_threads()
    _redirect_backward()
    # Checkpoints written on a GPU, and torch.load(..., map_location="cuda").
    torch.serialization.register_package(0, lambda storage: None, _load_on_cpu)


def _redirect_new_threads() -> None:
    start = threading.Thread.start

    def start_redirected(thread: threading.Thread) -> None:
        run = thread.run

        def run_redirected() -> None:
            del thread.run  # breaks a reference cycle
            with CudaToCpu():
                run()

        thread.run = run_redirected  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = start_redirected  # type: ignore[assignment, method-assign]


def _redirect_backward() -> None:
    """Enable the mode during backward(): a mode is disabled while it handles a call, but backward() runs user code."""
    run_backward = torch.autograd._engine_run_backward

    def run_backward_redirected(*args: Any, **kwargs: Any) -> Any:
        with CudaToCpu():
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = run_backward_redirected


def _load_on_cpu(storage: Any, location: str) -> Any:
    return storage if is_cuda(location) else None
