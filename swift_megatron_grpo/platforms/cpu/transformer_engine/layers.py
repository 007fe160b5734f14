"""The linear layers, column- or row-parallel, and the norms, in fp32, for the TE... classes of megatron-core.

Arguments are those of Transformer Engine 2.11. These have no effect on the numbers and are accepted:
`save_original_input` (what to keep for backward), `ub_name` and `name` (labels), `is_first_microbatch` (fp8 weight
cache).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from swift_megatron_grpo.platforms.cpu.stand_in import reject_unsupported
from swift_megatron_grpo.platforms.cpu.transformer_engine import base

_UNSUPPORTED = (
    "fuse_wgrad_accumulation", "parameters_split", "return_layernorm_output_gathered", "ub_overlap_ag", "ub_overlap_rs",
    "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad", "delay_wgrad_compute", "symmetric_ar_type",
)  # fmt: skip


class ParallelLinear(base.TransformerEngineBaseModule):
    """A linear layer that may be column- or row-parallel, and the arguments that all of them have."""

    in_features: int  # of this rank's shard [out_features, in_features]
    out_features: int

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: base.Initializer | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: base.Device = "cuda",
        ub_name: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
        **unsupported: Any,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        for argument in unsupported.keys() - {*_UNSUPPORTED}:
            raise TypeError(f"{owner}.__init__() got an unexpected keyword argument {argument!r}")
        reject_unsupported(owner, **unsupported)
        if parallel_mode not in (None, "column", "row"):
            raise ValueError(f"{owner}(parallel_mode={parallel_mode!r})")
        self._set_tensor_parallelism(tp_group, tp_size)
        self.sequence_parallel = sequence_parallel and self.tp_size > 1
        self.parallel_mode = parallel_mode
        split = {"column": out_features, "row": in_features}.get(parallel_mode or "", 0)
        if split % self.tp_size:
            raise ValueError(f"{owner}: {split} features are not divisible by tp_size {self.tp_size}")
        self.in_features = in_features // self.tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // self.tp_size if parallel_mode == "column" else out_features
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        self.fuse_wgrad_accumulation = False
        self.ub_name, self.name, self.save_original_input = ub_name, name, save_original_input
        self._init = base.default_weight_init if init_method is None else init_method
        self._placement = device, params_dtype

    def _new_weight_and_bias(self, suffix: str) -> None:
        shape, (device, dtype) = (self.out_features, self.in_features), self._placement
        self._new_parameter(f"weight{suffix}", shape, self._init, device, dtype, tracked=True)
        if self.use_bias:
            self._new_parameter(f"bias{suffix}", (self.out_features,), base.constant(0.0), device, dtype)
        else:
            setattr(self, f"bias{suffix}", torch.empty(0, device=device, dtype=dtype))  # Megatron reads its numel()

    def _mark(self, *suffixes: str) -> None:
        """Mark sharded parameters for Megatron's gradient norm. Like Transformer Engine, mark every weight."""
        for suffix in suffixes:
            weight = getattr(self, f"weight{suffix}")
            _mark_tensor_parallel(weight, dim=1 if self.parallel_mode == "row" else 0)
            if self.use_bias and self.parallel_mode == "column":
                _mark_tensor_parallel(getattr(self, f"bias{suffix}"), dim=0)
            if self.use_bias and self.parallel_mode == "row":
                getattr(self, f"bias{suffix}").sequence_parallel = self.sequence_parallel

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply x [s, b, in]. Sequence parallelism splits s in the input of column and the output of row layers."""
        parallel = self.parallel_mode if self.tp_size > 1 else None
        if parallel is not None and self.tp_group is None:
            raise RuntimeError(f"{type(self).__name__}: call set_tensor_parallel_group() before the first forward")
        regions: Any = base.mappings() if parallel else None
        if parallel == "column" and self.sequence_parallel:
            x = regions.gather_from_sequence_parallel_region(x, group=self.tp_group)
        elif parallel == "column":
            x = regions.copy_to_tensor_model_parallel_region(x, self.tp_group)
        y = F.linear(x, weight, bias if parallel != "row" else None)
        if parallel == "row" and self.sequence_parallel:
            y = regions.reduce_scatter_to_sequence_parallel_region(y, self.tp_group)
        elif parallel == "row":
            y = regions.reduce_from_tensor_model_parallel_region(y, self.tp_group)
        return y + bias if parallel == "row" and bias is not None else y


def _mark_tensor_parallel(parameter: nn.Parameter, dim: int) -> None:
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.partition_dim = dim  # type: ignore[attr-defined]
    parameter.partition_stride = 1  # type: ignore[attr-defined]


class Linear(ParallelLinear):
    """te.Linear."""

    weight: nn.Parameter
    bias: torch.Tensor

    def __init__(self, in_features: int, out_features: int, **arguments: Any) -> None:
        super().__init__(in_features, out_features, **arguments)
        self._new_weight_and_bias("")
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
        *,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(in_features, out_features, **arguments)
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"LayerNormLinear(normalization={normalization!r})")
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output  # LoRA switches it on and off
        gamma = base.constant(0.0 if zero_centered_gamma else 1.0)
        self._new_parameter("layer_norm_weight", (self.in_features,), gamma, *self._placement)
        if normalization == "LayerNorm":
            self._new_parameter("layer_norm_bias", (self.in_features,), base.constant(0.0), *self._placement)
        else:
            self.layer_norm_bias = None
        self._new_weight_and_bias("")
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
        weight, bias, rms = self.layer_norm_weight, self.layer_norm_bias, self.normalization == "RMSNorm"
        normalized = normalize(inp, weight, bias, self.eps, rms=rms, zero_centered=self.zero_centered_gamma)
        y = self._multiply(normalized, self.weight, self.bias if self.apply_bias else None)
        more = [*([self.bias] if self.return_bias else []), *([normalized] if self.return_layernorm_output else [])]
        return (y, *more) if more else y


class GroupedLinear(ParallelLinear):
    """One weight per expert. Tensor parallelism splits the weights; the token dispatcher communicates."""

    weight0: nn.Parameter

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **arguments: Any) -> None:
        super().__init__(in_features, out_features, **arguments)
        if self.use_bias and self.tp_size > 1:
            raise ValueError("GroupedLinear has no bias under tensor parallelism: its outputs are partial sums")
        self.num_gemms = num_gemms
        for gemm in range(num_gemms):
            self._new_weight_and_bias(str(gemm))
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


# ---- norms


def normalize(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *, rms: bool, zero_centered: bool
) -> torch.Tensor:
    """Normalise over the last weight.dim() dimensions of x; the result has x's dtype."""
    gamma = weight.float() + 1 if zero_centered else weight.float()
    if rms:
        return F.rms_norm(x.float(), gamma.shape, gamma, eps).to(x.dtype)
    return F.layer_norm(x.float(), gamma.shape, gamma, None if bias is None else bias.float(), eps).to(x.dtype)


class _Norm(base.TransformerEngineBaseModule):
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
        device: base.Device = None,
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
        gamma = base.constant(0.0 if zero_centered_gamma else 1.0)
        self._new_parameter("weight", self.normalized_shape, gamma, device, dtype)
        if not self._rms:
            self._new_parameter("bias", self.normalized_shape, base.constant(0.0), device, dtype)
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
