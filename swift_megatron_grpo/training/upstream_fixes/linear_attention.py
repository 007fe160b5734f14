"""Corrects two gradients of gated delta nets (Qwen3.5, Qwen3-Next) at TP > 1. All are of replicated weights.

Upstream, in mcore-bridge 1.6.5 with megatron-core 0.16.1:

* With sequence parallelism, `GatedDeltaNet.forward` gathers the tokens before its first layer, so every rank computes
  the whole gradient of `in_proj.layer_norm_weight`, and of the replicated halves of adapters on in_proj and out_proj.
  They are marked `sequence_parallel` nevertheless, and Megatron sums them over the ranks: TP times the gradient. On a
  small model the gradient norm was 0.6 % off, with LoRA 23 %.
* Without sequence parallelism, `out_norm.weight` gets the gradient of its rank's heads only, and nothing sums
  it: the copies of the ranks drift apart. With it, the mark makes Megatron sum it, which is right.

Fix: remove the first mark before the optimizer is built, and sum the second gradient after `finalize_model_grads`.

Tests: tests/contract/test_linear_attention.py fails once upstream is fixed; tests/dist/test_composite_layouts.py fails
at tp2 and tp2+sp without the fix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from mcore_bridge.model.modules import GatedDeltaNet
from megatron.core import mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_model_config


def unmark_gathered_projections(models: Iterable[torch.nn.Module]) -> None:
    """Remove the mark from the weights that see all tokens, and leave the mark of out_norm."""
    for net in delta_nets(models):
        if not net.config.linear_decoupled_in_proj:  # else the norm is a module of the layer, and its mark is right
            _unmark(net.in_proj)
        _unmark(net.out_proj)


def _unmark(projection: torch.nn.Module) -> None:
    for parameter in projection.parameters():
        parameter.sequence_parallel = False  # type: ignore[attr-defined]


def finalize_gradients(models: Sequence[torch.nn.Module], *args: Any, **options: Any) -> None:
    """Reduce all gradients as Megatron does, then those that it leaves out."""
    finalize_model_grads(models, *args, **options)
    config = get_model_config(models[0])
    if config.experimental_attention_variant != "gated_delta_net" or mpu.get_tensor_model_parallel_world_size() == 1:
        return
    for net in delta_nets(models):
        weight = net.out_norm.weight
        if weight.requires_grad and not config.sequence_parallel:
            dist.all_reduce(weight.main_grad, group=mpu.get_tensor_model_parallel_group())


def delta_nets(models: Iterable[torch.nn.Module]) -> list[GatedDeltaNet]:
    """Return the gated delta nets of these models."""
    return [module for model in models for module in model.modules() if isinstance(module, GatedDeltaNet)]
