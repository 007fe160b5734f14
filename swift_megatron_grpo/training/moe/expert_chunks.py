"""Skips sorting tokens by expert where they arrive in that order.

Megatron's alltoall dispatcher orders the tokens of a rank by expert and sends them. A receiver holds a chunk per sender
and expert, and sorts the chunks by expert. With one expert-parallel and one expert-tensor-parallel rank there is one
sender, so nothing is out of order. megatron-core up to 0.19.2 sorts nevertheless: it copies all routed tokens four
times per layer, in dispatch and combine, forward and backward. On an H200 that was 38 of the 880 ms of GPU kernels of a
step (12 layers, 64 experts, 8 per token, hidden size 2,048, 51k tokens), and its maps another 9.5 ms.

The dispatcher sorts only if its `num_local_experts` is above 1. Without a second rank it reads the number nowhere else,
but for experts that are padded to a capacity. tests/contract/test_megatron_seam.py lists all places.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher


def skip_sorting(model: torch.nn.Module) -> None:
    """Let dispatchers whose tokens arrive sorted treat them as those of one expert, which need no sorting."""
    for module in model.modules():
        if isinstance(module, MoELayer) and _arrive_sorted(module.token_dispatcher):
            module.token_dispatcher.num_local_experts = 1


def _arrive_sorted(dispatcher: Any) -> bool:
    """Return True if this rank alone sends to its experts, and they are not padded to a capacity."""
    return (
        type(dispatcher) is MoEAlltoAllTokenDispatcher
        and dispatcher.ep_size == 1
        and dispatcher.tp_size == 1
        and not dispatcher.drop_and_pad
    )
