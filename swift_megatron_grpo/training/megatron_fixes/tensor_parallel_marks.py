"""Megatron's gradient norm counts a parameter on every tensor-parallel rank if it is marked as sharded, else on one.

Two kinds of marks are wrong in a model that mcore-bridge has built, and clipping is then wrong by as much as the norm:

* megatron-core marks the embedding and the output layer where it initialises them at random. mcore-bridge loads weights
  instead (perform_initialization False), so all shards but the first are left out: 7-9 % on a small model.
* Transformer Engine marks the weight of every linear layer. Those that megatron-core calls "duplicated", such as the
  half of a LoRA adapter that every rank holds whole, are then counted TP times: 14 % on a small model.

Put right before the optimizer copies the marks to its own shards.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from mcore_bridge import LoraParallelLinear
from megatron.core.extensions.transformer_engine import TELinear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding


def mark_sharded_parameters(models: Iterable[torch.nn.Module]) -> None:
    for model in models:
        # Experts are sharded by expert parallelism; each is on one rank, whatever its layer is called.
        experts = {
            part
            for module in model.modules()
            if isinstance(module, LoraParallelLinear) and module.is_expert
            for part in module.modules()
        }
        for module in model.modules():
            if isinstance(module, (VocabParallelEmbedding, ColumnParallelLinear)):
                _mark(module, sharded=True, dim=0)
            elif isinstance(module, RowParallelLinear):
                _mark(module, sharded=True, dim=1)
            elif type(module) is TELinear and module not in experts:  # its subclasses are the sharded ones
                _mark(module, sharded=False, dim=-1)


def _mark(module: torch.nn.Module, sharded: bool, dim: int) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        if name == "bias" and dim == 1:
            continue  # of a row-parallel layer: whole on every rank, as marked
        parameter.tensor_model_parallel = sharded  # type: ignore[attr-defined]
        parameter.partition_dim = dim  # type: ignore[attr-defined]
        parameter.partition_stride = 1  # type: ignore[attr-defined]
