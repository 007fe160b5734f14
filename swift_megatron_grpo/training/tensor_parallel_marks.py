"""Megatron's gradient norm counts a parameter once per tensor-parallel group unless it is marked as sharded.

megatron-core sets the mark of the embedding and the output layer where it initialises them at random. mcore-bridge
loads weights instead (perform_initialization False), so their other shards are left out of the norm, 7-9 % on a small
model, and clipping is wrong by as much. The marks must be right before the optimizer copies them to its own shards.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding


def mark_sharded_parameters(models: Iterable[torch.nn.Module]) -> None:
    for model in models:
        for module in model.modules():
            if isinstance(module, (VocabParallelEmbedding, ColumnParallelLinear)):
                _mark(module.weight, dim=0)
                if isinstance(module, ColumnParallelLinear):
                    _mark(module.bias, dim=0)
            elif isinstance(module, RowParallelLinear):
                _mark(module.weight, dim=1)


def _mark(parameter: torch.nn.Parameter | None, dim: int) -> None:
    # None: the layer has no bias, or works with the embedding's weight
    if parameter is not None:
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        parameter.partition_dim = dim  # type: ignore[attr-defined]
        parameter.partition_stride = 1  # type: ignore[attr-defined]
