"""Finds the storages that hold parameters, gradients and optimizer state.

Storages, not tensors, are offloaded: Megatron's parameters and gradients are views of large buffers, tied weights share
one storage, and a storage that is emptied and filled again keeps every view of it valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

Storages = list[torch.UntypedStorage]


def trained_storages(models: Sequence[torch.nn.Module]) -> Storages:
    """Return the storages of trained parameters and of buffers: both may change in every step."""
    parameters = (p for model in models for p in model.parameters() if p.requires_grad)
    return distinct([*parameters, *_buffers(models)])


def frozen_storages(models: Sequence[torch.nn.Module]) -> Storages:
    """Return the storages of frozen parameters: the base of a LoRA adapter, frozen layers, a reference model."""
    frozen = distinct(p for model in models for p in model.parameters() if not p.requires_grad)
    return without(frozen, trained_storages(models))


def gradient_storages(models: Sequence[torch.nn.Module]) -> Storages:
    """Return the storages of Megatron's gradient buffers."""
    buffers = [
        buffer
        for model in models
        if isinstance(model, DistributedDataParallel)
        for buffer in [*model.buffers, *model.expert_parallel_buffers]
    ]
    # FP8 parameters may live in the gradient's buffer.
    return without(distinct(buffer.grad_data for buffer in buffers), trained_storages(models))


def optimizer_storages(optimizer: MegatronOptimizer, models: Sequence[torch.nn.Module]) -> Storages:
    """Return the storages of fp32 weights and optimizer states for the parameters that this rank updates.

    Adam creates its states in the first step.
    """
    tensors: list[torch.Tensor] = []
    for inner in torch_optimizers(optimizer):
        tensors += [parameter for group in inner.param_groups for parameter in group["params"]]
        if isinstance(inner, HybridDeviceOptimizer):  # --optimizer_cpu_offload: the share that stays on the GPU
            tensors += inner.param_to_fp32_param.values()
        tensors += [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
    # In fp32, and with the precision-aware optimizer, the optimizer updates the model's own weights.
    return without(distinct(tensors), trained_storages(models))


def torch_optimizers(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    """Return the torch optimizers inside Megatron's.

    Megatron chains one for dense and one for expert weights; a pipeline stage without weights has none.
    """
    chain = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return (link.optimizer for link in chain if link.optimizer is not None)


def distinct(tensors: Iterable[torch.Tensor]) -> Storages:
    """Return the non-empty storages of tensors on the device, each once, in the order of the tensors."""
    device = torch.device(torch.cuda.current_device()).type
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device)
    return list({storage._cdata: storage for storage in storages if storage.nbytes()}.values())


def without(storages: Storages, others: Storages) -> Storages:
    """Return `storages` that are not in `others`."""
    excluded = {storage._cdata for storage in others}
    return [storage for storage in storages if storage._cdata not in excluded]


def total_bytes(storages: Iterable[torch.UntypedStorage]) -> int:
    """Return the sum of the sizes."""
    return sum(storage.nbytes() for storage in storages)


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a view of the storage, [nbytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _buffers(models: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for model in models:
        # Megatron's DDP wrapper hides Module.buffers() with an attribute.
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        yield from inner.buffers()
