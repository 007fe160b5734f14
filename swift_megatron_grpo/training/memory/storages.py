"""The memory that the trained state lives in.

By storage, not by tensor: Megatron's parameters and gradients are views of large buffers, tied weights share one
storage, and a storage that was emptied and filled again leaves every view of it valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer

Storages = list[torch.UntypedStorage]


def trained_storages(models: Sequence[torch.nn.Module]) -> Storages:
    """Parameters that are trained, and buffers: both may change in every step."""
    parameters = (p for model in models for p in model.parameters() if p.requires_grad)
    return distinct([*parameters, *_buffers(models)])


def frozen_storages(models: Sequence[torch.nn.Module]) -> Storages:
    """The base under a LoRA adapter, frozen layers, a whole reference model."""
    frozen = distinct(p for model in models for p in model.parameters() if not p.requires_grad)
    return without(frozen, trained_storages(models))


def gradient_storages(models: Sequence[torch.nn.Module]) -> Storages:
    buffers = [
        buffer
        for model in models
        if isinstance(model, DistributedDataParallel)
        for buffer in [*model.buffers, *model.expert_parallel_buffers]
    ]
    # FP8 parameters may live in the gradient's buffer.
    return without(distinct(buffer.grad_data for buffer in buffers), trained_storages(models))


def optimizer_storages(optimizer: MegatronOptimizer, models: Sequence[torch.nn.Module]) -> Storages:
    """fp32 copies of the weights and the states, of what this rank updates. Adam makes its states in the first step."""
    tensors: list[torch.Tensor] = []
    for inner in torch_optimizers(optimizer):
        tensors += [parameter for group in inner.param_groups for parameter in group["params"]]
        tensors += [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
    # In fp32, and with the precision-aware optimizer, what is updated are the model's own weights.
    return without(distinct(tensors), trained_storages(models))


def torch_optimizers(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    """Megatron chains one for dense and one for expert weights; a stage without weights has none."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return (part.optimizer for part in parts if part.optimizer is not None)


def distinct(tensors: Iterable[torch.Tensor]) -> Storages:
    """Each once, in the order of the tensors; those on the device, and not empty."""
    device = torch.device(torch.cuda.current_device()).type
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device)
    return list({storage._cdata: storage for storage in storages if storage.nbytes()}.values())


def without(storages: Storages, others: Storages) -> Storages:
    excluded = {storage._cdata for storage in others}
    return [storage for storage in storages if storage._cdata not in excluded]


def total_bytes(storages: Iterable[torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages)


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """[nbytes] uint8, a view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _buffers(models: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for model in models:
        # Megatron's wrapper has an attribute in place of Module.buffers().
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        yield from inner.buffers()
