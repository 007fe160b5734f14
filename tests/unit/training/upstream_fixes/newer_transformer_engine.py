"""The stand-in with what newer versions of Transformer Engine do differently, as far as megatron-core can see it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer import clip_grads

from swift_megatron_grpo.platforms.cpu.transformer_engine import optimizers
from swift_megatron_grpo.platforms.cpu.transformer_engine.layers import GroupedLinear, ParallelLinear


@contextmanager
def experts_unmarked() -> Iterator[None]:
    """Leave the weights of experts unmarked, as Transformer Engine 2.13 and newer do."""
    reset_parameters = GroupedLinear.reset_parameters
    GroupedLinear.reset_parameters = ParallelLinear.reset_parameters  # type: ignore[method-assign]
    try:
        yield
    finally:
        GroupedLinear.reset_parameters = reset_parameters  # type: ignore[method-assign]


def multi_tensor_scale_tensor(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Sequence[Any], scale: torch.Tensor
) -> None:
    """Scale by a tensor of one element; Transformer Engine 2.14 and newer have this function."""
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)


def found_by_megatron() -> dict[str, Any]:
    """Return what megatron.core.optimizer.clip_grads has if its import of Transformer Engine 2.14 succeeds."""
    names = {
        "multi_tensor_applier": optimizers.multi_tensor_applier,
        "l2_norm_impl": optimizers.multi_tensor_l2norm,
        "multi_tensor_scale_impl": optimizers.multi_tensor_scale,
    }
    if hasattr(clip_grads, "multi_tensor_scale_tensor_impl"):  # megatron-core 0.17 and newer
        names["multi_tensor_scale_tensor_impl"] = multi_tensor_scale_tensor
    return names
