"""Corrects gated delta nets (Qwen3.5, Qwen3-Next): gradients at TP > 1, context parallelism, waits for the GPU.

Upstream, in mcore-bridge 1.6.5 with megatron-core 0.16.1:

* With sequence parallelism, `GatedDeltaNet.forward` gathers the tokens before its first layer, so every rank computes
  the whole gradient of `in_proj.layer_norm_weight`, and of the replicated halves of adapters on in_proj and out_proj.
  They are marked `sequence_parallel` nevertheless, and Megatron sums them over the ranks: TP times the gradient. On a
  small model the gradient norm was 0.6 % off, with LoRA 23 %.
* Without sequence parallelism, `out_norm.weight` gets the gradient of its rank's heads only, and nothing sums
  it: the copies of the ranks drift apart. With it, the mark makes Megatron sum it, which is right.
* Context parallelism is computed with two functions and a property of megatron-core 0.17. 0.16.1 has none of the three,
  and its configuration refuses the combination.
* Each delta net checks that the bounds of packed sequences begin at 0, end at the last token and suit the
  context-parallel ranks. The check waits for the GPU twice in each layer. It also returns a new view of the bounds, and
  the kernels, which cache what they derive from bounds by identity, read the lengths again in each layer: a third wait.
  The host cannot launch kernels ahead of the GPU.

Fix: remove the first mark before the optimizer is built, and sum the second gradient after `finalize_model_grads`.
Supply the functions, by megatron-core's own all-to-all of Mamba layers, and let the configuration pass. Between the two
a rank holds all tokens of a sequence and a part of the heads. mcore-bridge calls them for one sequence at a time, so
there are two all-to-alls per sequence and layer. Return the bounds as they are: those of packing/collate.py pass the
check by construction. With context parallelism each delta net still reads both bounds of every sequence, before its
kernels and after them, to exchange the tokens of one sequence after the other: four waits a sequence remain.

Tests: tests/contract/test_linear_attention.py fails once upstream is fixed, and names the versions that have the
functions; tests/dist/test_composite_layouts.py fails at tp2, tp2+sp and cp2 without the fixes;
tests/dist/test_sequence_bounds.py counts the tensors that the kernels get.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from mcore_bridge.model.modules import GatedDeltaNet
from megatron.core import mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.mamba_context_parallel import (
    _all_to_all_cp2hp,
    _all_to_all_hp2cp,
    _redo_attention_load_balancing,
    _undo_attention_load_balancing,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from swift_megatron_grpo.runtime.replaced import replaced, wrap


def unmark_gathered_projections(models: Iterable[torch.nn.Module]) -> None:
    """Remove the mark from the weights that see all tokens, and leave the mark of out_norm."""
    for net in delta_nets(models):
        parameters = list(net.out_proj.parameters())
        if not net.config.linear_decoupled_in_proj:  # else the norm is a module of the layer, and its mark is right
            parameters += net.in_proj.parameters()
        for parameter in parameters:
            parameter.sequence_parallel = False


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
    return [module for model in models for module in model.modules() if isinstance(module, GatedDeltaNet)]


def leave_bounds_unread(models: Iterable[torch.nn.Module]) -> None:
    """Replace the check of all gated delta nets in these models."""
    for net in delta_nets(models):
        net._resolve_cu_seqlens = bounds


def bounds(padded: torch.Tensor | None, actual: torch.Tensor, total: int, cp_size: int = 1) -> torch.Tensor:
    """Return the bounds [s + 1] of a micro batch, with padding if they are given with and without."""
    return actual if padded is None else padded


def supply_context_parallelism() -> None:
    """Supply what context parallelism lacks, before a configuration is created. Does nothing if it is there."""
    if hasattr(gated_delta_net, "tensor_a2a_cp2hp"):
        return
    gated_delta_net.tensor_a2a_cp2hp = _tokens_to_heads
    gated_delta_net.tensor_a2a_hp2cp = _heads_to_tokens
    gated_delta_net.GatedDeltaNet.cp_size = property(lambda net: net.pg_collection.cp.size())

    @wrap(TransformerConfig, "__post_init__")
    def check_as_one_rank(check: Any, config: Any) -> None:
        is_delta_net = config.experimental_attention_variant == "gated_delta_net"
        with replaced(config, "context_parallel_size", 1) if is_delta_net else nullcontext():
            check(config)


def _tokens_to_heads(x: torch.Tensor, seq_dim: int, head_dim: int, cp_group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange one sequence: [s / CP, b, h], zigzag slices -> [s, b, h / CP], all tokens in order."""
    _check_dimensions(x, seq_dim, head_dim)
    exchanged: torch.Tensor = _undo_attention_load_balancing(_all_to_all_cp2hp(x, cp_group), cp_group.size())
    return exchanged


def _heads_to_tokens(x: torch.Tensor, seq_dim: int, head_dim: int, cp_group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange back: [s, b, h / CP] -> [s / CP, b, h]."""
    _check_dimensions(x, seq_dim, head_dim)
    exchanged: torch.Tensor = _all_to_all_hp2cp(_redo_attention_load_balancing(x, cp_group.size()), cp_group)
    return exchanged


def _check_dimensions(x: torch.Tensor, seq_dim: int, head_dim: int) -> None:
    if seq_dim != 0 or head_dim not in (-1, x.ndim - 1):
        raise NotImplementedError(f"an exchange along dimensions {seq_dim} and {head_dim} of {list(x.shape)}")
