"""Writes sent tensors into the places of vLLM's parameters that an earlier load has shown.

vLLM's loaders look up each tensor by its name in Python, some 0.1 ms a tensor. The 18,867 tensors of Qwen3-30B-A3B,
three for each expert, take longer there than on the wire. Copies to known places start together instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from swift_megatron_grpo.weights.transport.buckets import NamedWeights, copy_all
from swift_megatron_grpo.weights.transport.held_weights import TensorSlice

BATCH_BYTES = 2**28  # of tensors that wait to be copied together


Target = tuple[TensorSlice, Callable[[], torch.Tensor]]  # a slice of a sent tensor, and the place that holds it


def write_directly(
    weights: NamedWeights,
    targets: Mapping[str, Sequence[Target]],
    complete_with: Callable[[str], Sequence[str]],
    quantize: Callable[[str], None],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Copy each tensor to its targets, and yield those that have none. Consume the iterator to its end.

    `complete_with`: returns the layers that are complete once this tensor is in its places; they are quantized then.
    """
    views: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    waiting = 0
    for name, tensor in weights:
        if name not in targets:
            yield name, tensor
            continue
        for part, view in targets[name]:
            views.append(view())
            sources.append(_slice_of(tensor, part))
        waiting += tensor.nbytes
        complete = complete_with(name)
        if complete or waiting >= BATCH_BYTES:
            copy_all(views, sources)
            views.clear()
            sources.clear()
            waiting = 0
        for layer in complete:
            quantize(layer)
    copy_all(views, sources)


def _slice_of(tensor: torch.Tensor, part: TensorSlice) -> torch.Tensor:
    if part.offset == 0 and part.shape == tensor.shape:
        return tensor
    whole = tensor.contiguous()
    return whole.as_strided(part.shape, part.strides, int(whole.storage_offset()) + part.offset)
