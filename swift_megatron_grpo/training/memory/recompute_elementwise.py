"""Drops activations that are cheap to recompute, instead of keeping them for backward (--recompute_elementwise).

Of the 44 kB that a token keeps in a layer of Qwen3-0.6B, 10 kB are the outputs of its two norms and of SwiGLU:
elementwise functions of tensors that are kept anyway. The memory of such an output is released once the next layer has
run forward, and the output is recomputed right before that layer runs backward. Autograd's saved tensor stays the same
object, and only its storage is emptied; hooks on saved tensors would also replace the weights, which are saved next to
it, and so lose their gradient buffers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def drop_and_recompute(saved: torch.Tensor, compute: Callable[[torch.Tensor], object], output: torch.Tensor) -> None:
    """Release the memory of `saved` now, and recompute it when backward reaches `output`.

    `output`: of the layer that has saved the tensor. `compute` writes the same values into the tensor it is given.
    """
    storage = saved.untyped_storage()
    pending = [(storage, storage.nbytes(), compute)]
    dtype = saved.dtype
    shape = saved.shape
    stride = saved.stride()
    storage.resize_(0)

    def recompute(_: torch.Tensor) -> None:
        # The graph, and this function with it, lives until the end of backward; the objects it refers to must not.
        while pending:
            storage, size, compute = pending.pop()
            storage.resize_(size)
            # A second tensor on the same storage: autograd would count writing into the saved one as a modification.
            alias = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, shape, stride)
            with torch.no_grad():
                compute(alias)

    output.register_hook(recompute)


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if both tensors have the same storage."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def producing_node(tensor: torch.Tensor, name: str) -> torch.autograd.graph.Node | None:
    """Return the autograd node that produced the tensor, looking through views, or None if it has another name."""
    node = tensor.grad_fn
    while node is not None and node.name() in ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"):
        node = node.next_functions[0][0]
    return node if node is not None and node.name() == name else None
