"""Linear, LayerNormLinear and GroupedLinear, column- or row-parallel, for the TE...Linear classes of megatron-core.

Arguments are those of Transformer Engine 2.11, in its order. These have no effect on the numbers and are accepted:
`save_original_input` (what to keep for backward), `ub_name` and `name` (labels), `is_first_microbatch` (fp8 weight
cache).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from swift_megatron_grpo.platforms.cpu.stand_in import reject_unsupported
from swift_megatron_grpo.platforms.cpu.transformer_engine.base import Device, Initializer, constant
from swift_megatron_grpo.platforms.cpu.transformer_engine.norm import normalize
from swift_megatron_grpo.platforms.cpu.transformer_engine.parallel_linear import ParallelLinear


class Linear(ParallelLinear):
    """te.Linear."""

    weight: nn.Parameter
    bias: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Initializer | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Device = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        reject_unsupported(
            "Linear",
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            parameters_split=parameters_split,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            delay_wgrad_compute=delay_wgrad_compute,
            symmetric_ar_type=symmetric_ar_type,
        )
        self._configure(
            in_features, out_features, parallel_mode, sequence_parallel, tp_group, tp_size, bias, return_bias,
            get_rng_state_tracker, rng_tracker_name,
        )  # fmt: skip
        self.ub_name, self.name, self.save_original_input = ub_name, name, save_original_input
        self._new_weight_and_bias("", init_method, device, params_dtype)
        self.reset_parameters(defer_init=self.weight.is_meta)

    def reset_parameters(self, defer_init: bool = False) -> None:
        super().reset_parameters(defer_init)
        if not defer_init:
            self._mark("")

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        reject_unsupported("Linear.forward", fp8_output=fp8_output, fp8_grad=fp8_grad)
        y = self._multiply(inp, self.weight, self.bias if self.apply_bias else None)
        return (y, self.bias) if self.return_bias else y


class LayerNormLinear(ParallelLinear):
    """te.LayerNormLinear: a norm followed by a linear layer."""

    weight: nn.Parameter
    bias: torch.Tensor
    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Initializer | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: Device = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        reject_unsupported(
            "LayerNormLinear",
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            return_layernorm_output_gathered=return_layernorm_output_gathered,
            parameters_split=parameters_split,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            delay_wgrad_compute=delay_wgrad_compute,
            symmetric_ar_type=symmetric_ar_type,
        )
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"LayerNormLinear(normalization={normalization!r})")
        self._configure(
            in_features, out_features, parallel_mode, sequence_parallel, tp_group, tp_size, bias, return_bias,
            get_rng_state_tracker, None,
        )  # fmt: skip
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output  # LoRA switches it on and off
        self.ub_name, self.name = ub_name, name
        gamma = constant(0.0 if zero_centered_gamma else 1.0)
        self._new_parameter("layer_norm_weight", (self.in_features,), gamma, device, params_dtype)
        if normalization == "LayerNorm":
            self._new_parameter("layer_norm_bias", (self.in_features,), constant(0.0), device, params_dtype)
        else:
            self.layer_norm_bias = None
        self._new_weight_and_bias("", init_method, device, params_dtype)
        self.reset_parameters(defer_init=self.weight.is_meta)

    def reset_parameters(self, defer_init: bool = False) -> None:
        super().reset_parameters(defer_init)
        if not defer_init:
            self._mark("")
            for parameter in (self.layer_norm_weight, self.layer_norm_bias):
                if parameter is not None:
                    parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Return y, then the bias with return_bias, then the normalised input with return_layernorm_output."""
        reject_unsupported("LayerNormLinear.forward", fp8_output=fp8_output, fp8_grad=fp8_grad)
        rms = self.normalization == "RMSNorm"
        normalized = normalize(
            inp, self.layer_norm_weight, self.layer_norm_bias, self.eps, rms=rms, zero_centered=self.zero_centered_gamma
        )
        y = self._multiply(normalized, self.weight, self.bias if self.apply_bias else None)
        outputs = (y, *([self.bias] if self.return_bias else []))
        outputs = (*outputs, *([normalized] if self.return_layernorm_output else []))
        return outputs if len(outputs) > 1 else y


class GroupedLinear(ParallelLinear):
    """One weight per expert. Tensor parallelism splits the weights; the token dispatcher communicates."""

    weight0: nn.Parameter

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Initializer | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Device = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        reject_unsupported(
            "GroupedLinear",
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_ag=ub_overlap_ag,
            delay_wgrad_compute=delay_wgrad_compute,
        )
        self._configure(
            in_features, out_features, parallel_mode, sequence_parallel, tp_group, tp_size, bias, return_bias,
            get_rng_state_tracker, rng_tracker_name,
        )  # fmt: skip
        if bias and self.tp_size > 1:
            raise ValueError("GroupedLinear has no bias under tensor parallelism: its outputs are partial sums")
        self.num_gemms = num_gemms
        self.ub_name, self.name, self.save_original_input = ub_name, name, save_original_input
        for gemm in range(num_gemms):
            self._new_weight_and_bias(str(gemm), init_method, device, params_dtype)
        self.reset_parameters(defer_init=self.weight0.is_meta)

    def reset_parameters(self, defer_init: bool = False) -> None:
        super().reset_parameters(defer_init)
        if not defer_init:
            self._mark(*map(str, range(self.num_gemms)))

    def forward(
        self, inp: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Multiply inp [tokens, in], sorted by expert; m_splits [num_gemms] is the number of tokens of each expert."""
        if len(m_splits) != self.num_gemms:
            raise ValueError(f"GroupedLinear: {len(m_splits)} splits for {self.num_gemms} weights")
        biases = [getattr(self, f"bias{gemm}") for gemm in range(self.num_gemms)]
        outputs = [
            F.linear(tokens, getattr(self, f"weight{gemm}"), biases[gemm] if self.apply_bias else None)
            for gemm, tokens in enumerate(inp.split(m_splits))
        ]
        y = torch.cat(outputs)
        return (y, biases) if self.return_bias else y
