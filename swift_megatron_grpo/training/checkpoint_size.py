"""Estimates the size of a checkpoint on disk before it is written."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core import mpu
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from swift_megatron_grpo.settings.config import SavedParts


def saved_bytes(models: Iterable[torch.nn.Module], parts: SavedParts, kept_bytes: int) -> float:
    """Return the share of this rank in the size of a checkpoint. The shares of all ranks add up.

    `kept_bytes`: of the tensors that are saved without being trained. The result is a lower bound: formats add a few
    percent to small models, and nearly nothing to large ones.
    """
    weights = adapter = optimizer = 0.0
    for parameter in (parameter for model in models for parameter in model.parameters()):
        count = parameter.numel() * _share(parameter)
        weights += count * parameter.element_size()
        if parameter.requires_grad:
            adapter += count * parameter.element_size()
            optimizer += count * parts.optimizer_bytes
    trained = adapter if parts.adapter_only else weights
    kept = kept_bytes / torch.distributed.get_world_size()
    return trained * parts.copies + weights * parts.merged_copies + kept * parts.whole_models + optimizer


def _share(parameter: torch.nn.Parameter) -> float:
    """Return the share of this rank in a parameter: one of the data-parallel ranks with the same values saves it."""
    if hasattr(parameter, "allreduce") and not parameter.allreduce:  # Megatron's mark of experts
        return 1 / float(mpu.get_expert_data_parallel_world_size())
    if not (param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)):
        return 0.0
    return 1 / float(mpu.get_data_parallel_world_size(with_context_parallel=True))
