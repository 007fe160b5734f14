"""The activation between the two products of an expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def plain_swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_on(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the kernel of Transformer Engine, as layers/fast_kernels.py has it; on a CPU the plain function."""
    if device.type != "cuda":
        return plain_swiglu
    import transformer_engine.pytorch  # noqa: F401  # it loads the library
    import transformer_engine_torch as kernels

    class SwiGLU(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate_and_up: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(gate_and_up)
            result: torch.Tensor = kernels.swiglu(gate_and_up, None)
            return result

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            [gate_and_up] = ctx.saved_tensors
            result: torch.Tensor = kernels.dswiglu(grad.contiguous(), gate_and_up, None)
            return result

    apply: Callable[[torch.Tensor], torch.Tensor] = SwiGLU.apply
    return apply
