"""flash-linear-attention's functions: the gated delta rule, the l2 norm and the causal convolution; and its modules.

Every sequence of a pack is computed by itself, so its result has the same bits alone and in any pack. Arithmetic is in
fp32, or in fp64 for inputs in fp64. `activate()` calls `install()`.

b: batch; t: tokens; c: tokens of a chunk; hk, h: heads of queries and keys, and of values; k, v: their sizes.
"""

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from swift_megatron_grpo.platforms.cpu.stand_in import module_tree, reject_unsupported

_CHUNK = 64


def l2norm(x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> torch.Tensor:
    exact = widened(x)
    return (exact / (exact.square().sum(-1, keepdim=True) + eps).sqrt()).to(output_dtype or x.dtype)


def chunk_gated_delta_rule(
    q: torch.Tensor,  # [b, t, hk, k]
    k: torch.Tensor,  # [b, t, hk, k]
    v: torch.Tensor,  # [b, t, h, v]
    g: torch.Tensor,  # [b, t, h] logarithm of the decay
    beta: torch.Tensor,  # [b, t, h]
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,  # [s + 1] bounds of the sequences of a pack
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Return [b, t, h, v] in the type of q, and no state."""
    reject_unsupported(
        "chunk_gated_delta_rule",
        initial_state=initial_state is not None,
        output_final_state=output_final_state,
        **others,
    )
    dtype = q.dtype
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    q, k = widened(q) * (q.shape[-1] ** -0.5 if scale is None else scale), widened(k)
    copies = v.shape[2] // k.shape[2]
    repeated = [x.repeat_interleave(copies, dim=2) for x in (q, k)]
    heads_first = [x.transpose(1, 2) for x in (*repeated, *map(widened, (v, g, beta)))]
    bounds = [0, v.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    if bounds[-1] != v.shape[1] or (cu_seqlens is not None and len(v) != 1):
        raise ValueError(f"chunk_gated_delta_rule: cu_seqlens {bounds} do not fit inputs of shape {list(v.shape)}")
    outputs = [
        delta_rule(*(x[:, :, begin:end] for x in heads_first))[0] for begin, end in pairwise(bounds) if end > begin
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).to(dtype), None


def delta_rule(
    q: torch.Tensor,  # [b, h, t, k] scaled
    k: torch.Tensor,  # [b, h, t, k]
    v: torch.Tensor,  # [b, h, t, v]
    g: torch.Tensor,  # [b, h, t]
    beta: torch.Tensor,  # [b, h, t]
    state: torch.Tensor | None = None,  # [b, h, k, v] before the first token; None: zeros
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one sequence; return [b, h, t, v] and the state after it.

    By token: S <- exp(g) S; S <- S + beta k (v - S^T k)^T; o = S^T q. The tokens of a chunk are computed together: what
    each writes, u = beta (v - S^T k), depends on the earlier ones by a unit lower triangular system (Yang et al. 2024,
    "Gated Delta Networks", section 3.3), and only the state passes from chunk to chunk.
    """
    if state is None:
        state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for chunk in zip(*(x.split(_CHUNK, dim=2) for x in (q, k, v, g, beta)), strict=True):
        output, state = _chunk((*chunk, state))
        outputs.append(output)
    return torch.cat(outputs, dim=2), state


def _chunk(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the tokens of one chunk: q, k, v, g and beta as in `delta_rule`, and the state before them."""
    q, k, v, g, beta, state = inputs
    since_start = g.cumsum(-1)  # [b, h, c]
    future = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).triu(1)
    between = since_start[..., :, None] - since_start[..., None, :]
    decay = between.masked_fill(future, -torch.inf).exp()  # [b, h, c, c] from the token of a column to that of a row
    # (1 + strictly lower part of beta k k^T decay) u = beta (v - decayed S^T k); the solver takes the diagonal as ones
    system = beta[..., None] * (k @ k.mT) * decay
    from_state = since_start.exp()[..., None]
    written = torch.linalg.solve_triangular(
        system, beta[..., None] * (v - from_state * (k @ state)), upper=False, unitriangular=True
    )  # [b, h, c, v]
    output = from_state * (q @ state) + (q @ k.mT * decay) @ written
    to_end = (since_start[..., -1:] - since_start).exp()[..., None]
    state = state * since_start[..., -1].exp()[..., None, None] + (k * to_end).mT @ written
    return output, state


def widened(x: torch.Tensor) -> torch.Tensor:
    """Convert to fp32, or leave fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


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
        activation=None if activation in ("silu", "swish") else activation,
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


_CONTENTS: dict[str, dict[str, Any]] = {
    "modules": {},
    "modules.conv": {},
    "modules.conv.causal_conv1d": {"causal_conv1d": causal_conv1d},
    "modules.convolution": {"causal_conv1d": causal_conv1d},
    "modules.l2norm": {"l2norm": l2norm},
    "ops": {},
    "ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
}


def install() -> None:
    """Install the tree. An installed flash-linear-attention is hidden: its Triton kernels need a GPU.

    transformers finds the tree in sys.modules as well and computes with it, so a reference for a test must be computed
    in a process without the platform.
    """
    sys.modules.update(module_tree(ModuleType("fla"), _CONTENTS))
