"""torch.distributed on gloo for code that was written for NCCL.

Installed by `activate()`. In torch 2.13 gloo supports nearly every collective that Megatron uses, including averages
and coalesced calls. This file adds the rest: the name "nccl", all_gather of tensors of different sizes, and one thread
for the connections of all groups.
"""

import functools
import logging
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

logger = logging.getLogger(__name__)

_init_process_group = dist.init_process_group
_new_group = dist.new_group
_all_gather = dist.all_gather
_make_gloo = distributed_c10d.ProcessGroupGloo.__init__


def install() -> None:
    for module in (dist, distributed_c10d):
        module.init_process_group = init_process_group  # type: ignore[attr-defined]
        module.new_group = new_group  # type: ignore[attr-defined]
    dist.all_gather = all_gather
    distributed_c10d.ProcessGroupGloo.__init__ = make_gloo  # type: ignore[assignment, method-assign]


@functools.wraps(_init_process_group)
def init_process_group(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
    _init_process_group(_gloo_for("gloo" if backend is None else backend), *args, **kwargs)


@functools.wraps(_new_group)
def new_group(
    ranks: list[int] | None = None, timeout: Any = None, backend: str | None = None, *args: Any, **kwargs: Any
) -> Any:
    return _new_group(ranks, timeout, _gloo_for(backend), *args, **{**kwargs, "device_id": None})


def _gloo_for(backend: str | None) -> str | None:
    """Replace "nccl" and "cpu:gloo,cuda:nccl" by "gloo". None in new_group means the default group's backend."""
    if backend is None or "nccl" not in backend.lower():
        return backend
    _warn_once(f"the CPU platform uses gloo in place of {backend}")
    return "gloo"


@functools.cache
def _warn_once(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        logger.warning(message)


def make_gloo(group: Any, store: Any, rank: int, size: int, timeout: Any) -> None:
    """Connect a group through the device of all groups. One for each, as by default, is a thread that always polls.

    A caller that gives options in place of a timeout has chosen a device.
    """
    options = timeout
    if isinstance(timeout, timedelta):
        options = distributed_c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout, options._devices = timeout, [_device()]
    _make_gloo(group, store, rank, size, options)


@functools.cache
def _device() -> Any:
    return distributed_c10d.ProcessGroupGloo.create_default_device()


@functools.wraps(_all_gather)
def all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Gather tensors; gloo needs padding where shapes differ (Megatron's experts under tensor parallelism)."""
    if len({t.shape for t in tensor_list}) == 1:
        return _all_gather(tensor_list, tensor, group, async_op)
    if async_op:
        raise NotImplementedError("all_gather of tensors of different shapes with async_op=True on the CPU platform")
    largest = max(t.numel() for t in tensor_list)
    padded = tensor.new_zeros(largest)
    padded[: tensor.numel()] = tensor.flatten()
    gathered = [tensor.new_empty(largest) for _ in tensor_list]
    _all_gather(gathered, padded, group)
    for target, source in zip(tensor_list, gathered, strict=True):
        target.copy_(source[: target.numel()].view(target.shape))
    return None
