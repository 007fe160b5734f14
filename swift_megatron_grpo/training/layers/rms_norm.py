"""RMSNorm by Transformer Engine's kernels, called directly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class NormSettings:
    eps: float
    zero_centered: bool  # the weight is 1 plus the parameter
    forward_margin: int  # multiprocessors that are left to communication
    backward_margin: int


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, settings: NormSettings) -> torch.Tensor:
        """Normalize the last dimension of x, whose size is that of weight."""
        import transformer_engine_torch as kernels
        from transformer_engine.pytorch.constants import TE_DType

        rows = x.contiguous().view(-1, weight.numel())
        y, _, deviations = kernels.rmsnorm_fwd(
            rows, weight, settings.eps, None, None, TE_DType[x.dtype], settings.forward_margin, settings.zero_centered
        )
        ctx.save_for_backward(rows, deviations, weight)
        ctx.settings = settings
        output: torch.Tensor = y.view(x.shape)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        import transformer_engine_torch as kernels

        rows, deviations, weight = ctx.saved_tensors
        d_rows, d_weight = kernels.rmsnorm_bwd(
            grad.contiguous().view(rows.shape), rows, deviations, weight, ctx.settings.backward_margin,
            ctx.settings.zero_centered,
        )  # fmt: skip
        return d_rows.view(grad.shape), d_weight, None
