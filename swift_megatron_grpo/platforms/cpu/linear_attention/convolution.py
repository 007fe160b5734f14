"""The causal convolution over packed sequences, with the arguments of flash-linear-attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from swift_megatron_grpo.platforms.cpu.linear_attention.delta_rule import widened
from swift_megatron_grpo.platforms.cpu.linear_attention.refusal import reject_unsupported

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
    tokens, width = x.shape[1], weight.shape[1]
    exact, taps = widened(x), widened(weight)
    places = _places(tokens, cu_seqlens, x.device)
    total = exact * taps[:, -1]
    for back in range(1, min(width, tokens)):
        earlier = F.pad(exact[:, :-back], (0, 0, back, 0))  # [b, t, d] the token `back` places before
        total = total + torch.where((places >= back)[:, None], earlier, 0.0) * taps[:, -1 - back]
    if bias is not None:
        total = total + widened(bias)
    return (F.silu(total) if activation is not None else total).to(x.dtype), None


def _places(tokens: int, cu_seqlens: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Return the place of each token in its sequence: [t]."""
    places = torch.arange(tokens, device=device)
    if cu_seqlens is None:
        return places
    bounds = cu_seqlens.long()
    if bounds[-1] != tokens:
        raise ValueError(f"causal_conv1d: cu_seqlens {bounds.tolist()} do not fit {tokens} tokens")
    return places - bounds[:-1].repeat_interleave(bounds.diff())
