"""Activations that cost little to make again are not kept for backward.

Of the 44 kB that a token keeps in a layer of Qwen3-0.6B, 10 are the outputs of its two norms and of SwiGLU: elementwise
functions of what is kept anyway. Such an output loses its memory once the layer behind it has run forward, and is made
again right before that layer runs backward. The tensor that autograd has saved stays the same one, with its memory
taken away under it; hooks on saved tensors would strip the weights, saved beside it, of their gradient buffers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def drop_and_recompute(saved: torch.Tensor, make: Callable[[torch.Tensor], object], behind: torch.Tensor) -> None:
    """`behind` is the output of the layer that has saved it; `make` writes the same values again."""
    memory = saved.untyped_storage()
    pending = [(memory, memory.nbytes(), make)]
    dtype, shape, stride = saved.dtype, saved.shape, saved.stride()
    memory.resize_(0)

    def recompute(_: torch.Tensor) -> None:
        # The graph, and this function with it, lives until all of backward is done: what it refers to must not.
        while pending:
            memory, size, make = pending.pop()
            memory.resize_(size)
            # Another tensor with the same memory: writing into the saved one would be a change of value to autograd.
            alias = torch.empty(0, dtype=dtype, device=memory.device).set_(memory, 0, shape, stride)
            with torch.no_grad():
                make(alias)

    behind.register_hook(recompute)


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def producing_node(tensor: torch.Tensor, name: str) -> torch.autograd.graph.Node | None:
    """The autograd node of this name that made the tensor, perhaps through views; None if another one did."""
    node = tensor.grad_fn
    while node is not None and node.name() in ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"):
        node = node.next_functions[0][0]
    return node if node is not None and node.name() == name else None
