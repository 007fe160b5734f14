"""The causal convolution over packed sequences, with the arguments of flash-linear-attention.

Every sequence is convolved by itself, so its result has the same bits alone and in any pack.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from swift_megatron_grpo.platforms.cpu.linear_attention.delta_rule import widened
from swift_megatron_grpo.platforms.cpu.stand_in import reject_unsupported

_SILU = ("silu", "swish")


def causal_conv1d(
    x: torch.Tensor,  # [b, t, d]
    weight: torch.Tensor,  # [d, w]; the last column belongs to the token itself
    bias: torch.Tensor | None = None,  # [d]
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,  # [s + 1] bounds of the sequences of a pack
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Return [b, t, d] in the type of x, and no state. No token reads one of another sequence."""
    reject_unsupported(
        "causal_conv1d",
        residual=residual,
        initial_state=initial_state,
        output_final_state=output_final_state,
        activation=None if activation in _SILU else activation,
        **others,
    )
    tokens = x.shape[1]
    bounds = [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()
    if bounds[-1] != tokens:
        raise ValueError(f"causal_conv1d: cu_seqlens {bounds} do not fit {tokens} tokens")
    exact, taps = widened(x), widened(weight)
    offset = None if bias is None else widened(bias)
    # One by one: the activation of a number depends, in its last bit, on the size of the tensor that holds it.
    convolved = [
        _sequence(exact[:, begin:end], taps, offset, activation is not None) for begin, end in pairwise(bounds)
    ]
    return torch.cat(convolved, dim=1).to(x.dtype), None


def _sequence(x: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None, activated: bool) -> torch.Tensor:
    """Convolve [b, t, d] with [d, w]; the tokens before the first are zeros."""
    tokens, width = x.shape[1], taps.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    total = padded[:, :tokens] * taps[:, 0]
    for place in range(1, width):
        total = total + padded[:, place : place + tokens] * taps[:, place]
    if bias is not None:
        total = total + bias
    return F.silu(total) if activated else total
