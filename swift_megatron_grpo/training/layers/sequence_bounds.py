"""Gives gated delta nets (Qwen3.5, Qwen3-Next) the bounds of packed sequences without reading them on the host.

Upstream, in mcore-bridge 1.6.5: each delta net checks that the bounds begin at 0, end at the last token and suit the
context-parallel ranks. The check waits for the GPU twice in each layer. It also returns a new view of the bounds, and
the kernels, which cache what they derive from bounds by identity, read the lengths again in each layer: a third wait.
The host cannot launch kernels ahead of the GPU.

Bounds of packing/collate.py pass the check by construction. Fix: return them as they are. With context parallelism each
delta net also reads both bounds of every sequence, once before its kernels and once after them, to exchange the tokens
of one sequence after the other. These four waits a sequence remain.

Tests: tests/contract/test_linear_attention.py compares with upstream's check, and fails once that reads nothing;
tests/dist/test_sequence_bounds.py counts the tensors that the kernels get.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from swift_megatron_grpo.training.upstream_fixes.linear_attention import delta_nets


def leave_bounds_unread(models: Iterable[torch.nn.Module]) -> None:
    """Replace the check of all gated delta nets in these models."""
    for net in delta_nets(models):
        net._resolve_cu_seqlens = bounds


def bounds(padded: torch.Tensor | None, actual: torch.Tensor, total: int, cp_size: int = 1) -> torch.Tensor:
    """Return the bounds [s + 1] of a micro batch, with padding if they are given with and without."""
    return actual if padded is None else padded
