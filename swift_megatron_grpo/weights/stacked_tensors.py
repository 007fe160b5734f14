"""Tensors that are evenly spaced in one memory, as one tensor."""

from collections.abc import Sequence

import torch


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return a view [len(tensors), ...] of tensors of one shape; None: they are not evenly spaced in one memory."""
    first = tensors[0].detach()
    addresses = [tensor.data_ptr() for tensor in tensors]
    step = addresses[1] - addresses[0] if len(tensors) > 1 else first.numel() * first.element_size()
    evenly = all(address == addresses[0] + i * step for i, address in enumerate(addresses))
    memory = first.untyped_storage()
    inside = addresses[-1] + first.numel() * first.element_size() <= memory.data_ptr() + memory.nbytes()
    if not evenly or not inside or step < first.numel() * first.element_size() or step % first.element_size():
        return None
    return first.as_strided((len(tensors), *first.shape), (step // first.element_size(), *first.stride()))
