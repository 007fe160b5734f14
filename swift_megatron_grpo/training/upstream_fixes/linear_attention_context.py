"""Gives gated delta nets (Qwen3.5, Qwen3-Next) context parallelism.

Upstream: mcore-bridge 1.6.5 computes it, with two functions and a property of megatron-core 0.17. megatron-core 0.16.1
has none of the three, and its configuration refuses the combination.

Fix: supply the three, by megatron-core's own all-to-all of Mamba layers, and let the configuration pass. Between the
two functions a rank holds all tokens of a sequence and a part of the heads. mcore-bridge calls them for one sequence at
a time, so there are two all-to-alls per sequence and layer.

Tests: tests/contract/test_linear_attention.py names the versions that have the functions; tests/dist/
test_composite_layouts.py compares cp2 with one rank.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.mamba_context_parallel import (
    _all_to_all_cp2hp,
    _all_to_all_hp2cp,
    _redo_attention_load_balancing,
    _undo_attention_load_balancing,
)
from megatron.core.transformer.transformer_config import TransformerConfig


def supply_context_parallelism() -> None:
    """Supply what is missing, before a configuration is created. Does nothing if it is there."""
    if hasattr(gated_delta_net, "tensor_a2a_cp2hp"):
        return
    gated_delta_net.tensor_a2a_cp2hp = _tokens_to_heads
    gated_delta_net.tensor_a2a_hp2cp = _heads_to_tokens
    gated_delta_net.GatedDeltaNet.cp_size = property(lambda net: net.pg_collection.cp.size())
    check = TransformerConfig.__post_init__

    @functools.wraps(check)
    def check_as_one_rank(config: Any) -> None:
        if config.experimental_attention_variant != "gated_delta_net":
            check(config)
            return
        size = config.context_parallel_size
        config.context_parallel_size = 1
        try:
            check(config)
        finally:
            config.context_parallel_size = size

    TransformerConfig.__post_init__ = check_as_one_rank


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
