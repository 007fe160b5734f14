"""RMSNorm and LayerNorm with fp32 arithmetic, used by megatron-core's TENorm and by LayerNormLinear."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from swift_megatron_grpo.platforms.cpu.stand_in import reject_unsupported
from swift_megatron_grpo.platforms.cpu.transformer_engine.base import Device, TransformerEngineBaseModule, constant


def normalize(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *, rms: bool, zero_centered: bool
) -> torch.Tensor:
    """Normalise over the last weight.dim() dimensions of x; the result has x's dtype."""
    gamma = weight.float() + 1 if zero_centered else weight.float()
    if rms:
        return F.rms_norm(x.float(), gamma.shape, gamma, eps).to(x.dtype)
    return F.layer_norm(x.float(), gamma.shape, gamma, None if bias is None else bias.float(), eps).to(x.dtype)


class _Norm(TransformerEngineBaseModule):
    _rms: bool
    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        sm_margin: int = 0,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        reject_unsupported(owner, sm_margin=sm_margin)
        if (normalized_shape is None) == (hidden_size is None):
            raise TypeError(f"{owner} takes either normalized_shape or hidden_size")
        shape = hidden_size if normalized_shape is None else normalized_shape
        assert shape is not None
        self.normalized_shape = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        self.eps = eps
        self.sequence_parallel = sequence_parallel  # type: ignore[assignment]  # None: parameters are not marked
        self.zero_centered_gamma = zero_centered_gamma
        dtype = params_dtype if dtype is None else dtype
        gamma = constant(0.0 if zero_centered_gamma else 1.0)
        self._new_parameter("weight", self.normalized_shape, gamma, device, dtype)
        if not self._rms:
            self._new_parameter("bias", self.normalized_shape, constant(0.0), device, dtype)
        self.reset_parameters(defer_init=self.weight.is_meta)

    def reset_parameters(self, defer_init: bool = False) -> None:
        super().reset_parameters(defer_init)
        if not defer_init and self.sequence_parallel is not None:
            for parameter in self.parameters(recurse=False):
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self._rms else self.bias
        return normalize(x, self.weight, bias, self.eps, rms=self._rms, zero_centered=self.zero_centered_gamma)


class RMSNorm(_Norm):
    _rms = True


class LayerNorm(_Norm):
    _rms = False
