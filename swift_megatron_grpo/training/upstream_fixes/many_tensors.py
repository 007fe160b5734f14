"""Makes Transformer Engine's optimizer accept as many tensors as the adapters of experts are.

Upstream: each call of a multi-tensor kernel takes a handle for every tensor of every list from a pool of 20 MiB, which
is 70,849 handles in Transformer Engine 2.11 and fewer in newer ones. Adapters on all experts of Qwen3-30B-A3B are
almost 25,000 tensors, and `FusedAdam` has four lists of them: the first optimizer step ends with "Cannot allocate a new
NVTETensor" (issue 2189). Newer versions split the lists of `FusedAdam` alone (pull request 3418), not those of the
gradient norm and of clipping.

Fix: every multi-tensor call passes its lists in parts. All kernels work tensor by tensor; norms of parts are combined.

Tests: tests/unit/training/upstream_fixes/test_many_tensors.py, and tests/gpu/test_many_tensors.py, which fails once
upstream takes as many tensors in one call; then delete this file.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

MOST_TENSORS = 2048  # of a list in one call; a dense model has fewer

Lists = list[list[torch.Tensor]]


def bound_tensor_handles() -> None:
    """Make Transformer Engine pass long lists of tensors in parts, where it is installed."""
    try:
        module = importlib.import_module("transformer_engine.pytorch.optimizers.multi_tensor_apply")
    except ImportError:
        return  # a CPU: its stand-in takes any number
    whole = module.MultiTensorApply.__call__
    if whole.__name__ != "call_in_parts":
        module.MultiTensorApply.__call__ = in_parts(whole)


def in_parts(whole: Callable[..., Any]) -> Callable[..., Any]:
    """Return `MultiTensorApply.__call__` for lists of any length."""

    def call_in_parts(self: Any, op: Any, noop_flag: torch.Tensor, lists: Lists, *arguments: Any) -> Any:
        if len(lists[0]) <= MOST_TENSORS:
            return whole(self, op, noop_flag, lists, *arguments)
        results = [whole(self, op, noop_flag, part, *arguments) for part in _parts(lists)]
        return None if results[0] is None else _combine_norms(results)

    return call_in_parts


def _parts(lists: Lists) -> Iterator[Lists]:
    for start in range(0, len(lists[0]), MOST_TENSORS):
        yield [tensors[start : start + MOST_TENSORS] for tensors in lists]


def _combine_norms(results: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of all tensors, [1], and the norm of each, which is empty unless the call asked for it."""
    norms = torch.cat([norm.view(1) for norm, _ in results])
    return torch.linalg.vector_norm(norms).view(1), torch.cat([each for _, each in results])
