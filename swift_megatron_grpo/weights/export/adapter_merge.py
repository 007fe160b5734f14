"""Frozen weights plus the product of an adapter, in one rounding.

The matrix product adds the weight itself, so that a merge reads and writes each weight once; separate sums in fp32
move 34 bytes for a weight of two. The experts of a layer are one product, because Qwen3-30B-A3B has 12,288 of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mcore_bridge import LoraParallelLinear
from peft.tuners.lora import LoraLayer

from swift_megatron_grpo.weights.stacked_tensors import stacked


def merged_weights(module: LoraLayer, adapter: str) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Return the frozen weights of a module, each with its merged value in new memory."""
    base = module.get_base_layer()
    if not isinstance(module, LoraParallelLinear):  # in a vision tower, which is a model of transformers
        delta = module.get_delta_weight(adapter).float()
        return [(base.weight, (base.weight.data.float() + delta).to(base.weight.dtype))]
    layers = (base, module.lora_A[adapter], module.lora_B[adapter])
    names = [f"weight{expert}" for expert in range(base.num_gemms)] if module.is_grouped else ["weight"]
    bases, downs, ups = ([getattr(layer, name) for name in names] for layer in layers)
    return list(zip(bases, merge(bases, downs, ups, module.scaling[adapter]), strict=True))


@torch.no_grad()
def merge(
    bases: Sequence[torch.Tensor], downs: Sequence[torch.Tensor], ups: Sequence[torch.Tensor], scaling: float
) -> Sequence[torch.Tensor]:
    """Return base + scaling * up @ down for each base [out, in], down [rank, in] and up [out, rank]."""
    if not bases[0].dtype == downs[0].dtype == ups[0].dtype:  # a router in fp32 under an adapter in bf16
        deltas = [up.float() @ down.float() for up, down in zip(ups, downs, strict=True)]
        return [(base.float() + scaling * delta).to(base.dtype) for base, delta in zip(bases, deltas, strict=True)]
    if len(bases) > 1:
        base = stacked(bases)
        down = stacked(downs)
        up = stacked(ups)
        if base is not None and down is not None and up is not None:
            return torch.baddbmm(base, up, down, alpha=scaling).unbind()
    return [torch.addmm(*tensors, alpha=scaling) for tensors in zip(bases, ups, downs, strict=True)]
