"""Moves gradients to the distributed optimizer, and its results to the model, without a search for each tensor.

Upstream: `DistributedOptimizer` looks up the place of each parameter in three dictionaries, makes two views of it, and
launches a kernel that copies it, twice in each step. That is the host's time alone, some 20 microseconds a tensor (an
estimate), and adapters on all experts of Qwen3-30B-A3B are almost 25,000 tensors.

Fix: the places are found once, and all results are copied by one call. Float8 parameters, gradients that are not fp32
and Megatron's FSDP are left to upstream.

Tests: tests/dist/test_optimizer_copies.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_upstream_gradients = DistributedOptimizer._copy_model_grads_to_main_grads
_upstream_results = DistributedOptimizer._copy_main_params_to_model_params

Pair = tuple[Any, torch.Tensor]  # a parameter, to which Megatron adds attributes, and its main weights


@dataclass(frozen=True, slots=True)
class Places:
    """Weights that this rank's optimizer holds, and their parts of the buffers of gradients and parameters."""

    memory: list[int]  # of the buffers
    mains: list[torch.Tensor]
    gradients: list[torch.Tensor]
    parameters: list[torch.Tensor]


_places: WeakKeyDictionary[DistributedOptimizer, Places] = WeakKeyDictionary()


def copy_without_search() -> None:
    """Install both in this process."""
    DistributedOptimizer._copy_model_grads_to_main_grads = _pass_gradients
    DistributedOptimizer._copy_main_params_to_model_params = _copy_results


def _pass_gradients(self: DistributedOptimizer) -> None:
    if not is_covered(self):
        _upstream_gradients(self)
        return
    places = places_of(self)
    for main, gradient in zip(places.mains, places.gradients, strict=True):
        main.grad = gradient


def _copy_results(self: DistributedOptimizer) -> None:
    if not is_covered(self):
        _upstream_results(self)
        return
    places = places_of(self)
    torch._foreach_copy_(places.parameters, places.mains)


def is_covered(optimizer: DistributedOptimizer) -> bool:
    """Return True if gradients and results are moved by this file, not by upstream."""
    return not (
        optimizer.is_stub_optimizer
        or optimizer.ddp_config.use_megatron_fsdp
        or optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        or any(
            buffer.grad_dtype != torch.float32 or buffer.param_dtype == torch.uint8  # float8
            for buffer in optimizer.buffers
        )
    )


def places_of(optimizer: DistributedOptimizer) -> Places:
    """Return the places, found anew if a buffer has other memory; offloading keeps it, as a storage of no bytes."""
    memory = [
        data.untyped_storage()._cdata for buffer in optimizer.buffers for data in (buffer.grad_data, buffer.param_data)
    ]
    places = _places.get(optimizer)
    if places is None or places.memory != memory:
        places = _places[optimizer] = _find_places(optimizer, memory)
    return places


@contextmanager
def using_places(optimizer: DistributedOptimizer, places: Places) -> Iterator[None]:
    """Move gradients and results between these places inside the context: those of a few large tensors."""
    own = places_of(optimizer)
    _places[optimizer] = places
    try:
        yield
    finally:
        _places[optimizer] = own


def _find_places(optimizer: DistributedOptimizer, memory: list[int]) -> Places:
    mains, gradients, parameters = [], [], []
    for parameter, main in _pairs(optimizer):
        ranges = optimizer._get_model_param_range_map(parameter)
        of_parameter, of_bucket = ranges["param"], ranges["gbuf_world_in_bucket"]
        assert of_parameter.size == of_bucket.size == main.nelement()
        buffer, _, number = optimizer.model_param_gbuf_map[parameter]
        bucket = optimizer.buffers[buffer].buckets[number]
        mains.append(main)
        gradients.append(parameter.main_grad.view(-1)[of_parameter.start : of_parameter.end])
        parameters.append(bucket.param_data.view(-1)[of_bucket.start : of_bucket.end])
    return Places(memory, mains, gradients, parameters)


def _pairs(optimizer: DistributedOptimizer) -> Iterator[Pair]:
    """Yield each parameter of which this rank updates a part, with the weights that its optimizer holds."""
    for parameters, mains in (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    ):
        for of_group, mains_of_group in zip(parameters, mains, strict=True):
            yield from zip(of_group, mains_of_group, strict=True)
