"""Makes optimizer steps use Transformer Engine's multi-tensor kernels, for any number of tensors.

Upstream:

* From megatron-core 0.17 on, `optimizer/clip_grads.py` imports four functions of Transformer Engine in one statement.
  Transformer Engine has one of them, `multi_tensor_scale_tensor`, from 2.14 on. With 2.11 to 2.13 the whole statement
  fails, and Megatron falls back to Python loops: one kernel and one copy to the host per gradient for the norm, and two
  kernels per gradient to scale it. The numbers are the same, and one warning says that Transformer Engine is not
  installed.
* Each call of a multi-tensor kernel takes a handle for every tensor of every list from a pool of 20 MiB, which is
  70,849 handles in Transformer Engine 2.11 and fewer in newer ones. Adapters on all experts of Qwen3-30B-A3B are almost
  25,000 tensors, and `FusedAdam` has four lists of them: the first optimizer step ends with "Cannot allocate a new
  NVTETensor" (issue 2189). Newer versions split the lists of `FusedAdam` alone (pull request 3418), not those of the
  gradient norm and of clipping.

Fix: set the three functions that are there, which are all that megatron-core 0.16.1 uses, unless Megatron has found the
kernels itself. Every multi-tensor call passes its lists in parts: all kernels work tensor by tensor; norms of parts are
combined.

Tests: tests/unit/training/upstream_fixes/test_gradient_clipping.py fails once upstream imports them one by one; the
first part can also go with support for Transformer Engine below 2.14. tests/unit/training/upstream_fixes/
test_many_tensors.py, and tests/gpu/test_many_tensors.py, which fails once upstream takes as many tensors in one call.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads

_KERNELS = {
    "multi_tensor_applier": "multi_tensor_applier",
    "l2_norm_impl": "multi_tensor_l2norm",
    "multi_tensor_scale_impl": "multi_tensor_scale",
}
MOST_TENSORS = 2048  # of a list in one call; a dense model has fewer

Lists = list[list[torch.Tensor]]


def clip_with_transformer_engine() -> None:
    """Replace Megatron's loops by Transformer Engine's kernels, if there are any."""
    if clip_grads.multi_tensor_applier is not utils.local_multi_tensor_applier:
        return
    try:
        optimizers = importlib.import_module("transformer_engine.pytorch.optimizers")
        kernels = {name: getattr(optimizers, kernel) for name, kernel in _KERNELS.items()}
    except (ImportError, AttributeError):
        return  # the loops are slow but right
    for name, kernel in kernels.items():
        setattr(clip_grads, name, kernel)


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
        results = []
        for start in range(0, len(lists[0]), MOST_TENSORS):
            part = [tensors[start : start + MOST_TENSORS] for tensors in lists]
            results.append(whole(self, op, noop_flag, part, *arguments))
        if results[0] is None:
            return None
        # The norm of all tensors, [1], and the norm of each, which is empty unless the call asked for it.
        norms = torch.cat([norm.view(1) for norm, _ in results])
        return torch.linalg.vector_norm(norms).view(1), torch.cat([each for _, each in results])

    return call_in_parts
