"""Base class of the linear layers: the rank's weight shard, its marks for Megatron, and the communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from swift_megatron_grpo.platforms.cpu.transformer_engine.base import (
    Device,
    Initializer,
    TransformerEngineBaseModule,
    constant,
    default_weight_init,
)
from swift_megatron_grpo.platforms.cpu.transformer_engine.collectives import (
    CopyToGroup,
    GatherSequence,
    ReduceFromGroup,
    ReduceScatterSequence,
)


class ParallelLinear(TransformerEngineBaseModule):
    """A linear layer that may be column- or row-parallel."""

    in_features: int  # of this rank's shard [out_features, in_features]
    out_features: int

    def _configure(
        self,
        in_features: int,
        out_features: int,
        parallel_mode: str | None,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup | None,
        tp_size: int,
        bias: bool,
        return_bias: bool,
        tracker: Callable[[], Any] | None,
        tracker_name: str | None,
    ) -> None:
        if parallel_mode not in (None, "column", "row"):
            raise ValueError(f"{type(self).__name__}(parallel_mode={parallel_mode!r})")
        self._set_tensor_parallelism(tp_group, tp_size)
        self.sequence_parallel = sequence_parallel and self.tp_size > 1
        self.parallel_mode = parallel_mode
        split = {"column": out_features, "row": in_features}.get(parallel_mode or "", 0)
        if split % self.tp_size:
            raise ValueError(f"{type(self).__name__}: {split} features are not divisible by tp_size {self.tp_size}")
        self.in_features = in_features // self.tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // self.tp_size if parallel_mode == "column" else out_features
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.get_rng_state_tracker, self.rng_tracker_name = tracker, tracker_name
        self.fuse_wgrad_accumulation = False

    def _new_weight_and_bias(
        self, suffix: str, init: Initializer | None, device: Device, dtype: torch.dtype | None
    ) -> None:
        init = default_weight_init if init is None else init
        self._new_parameter(f"weight{suffix}", (self.out_features, self.in_features), init, device, dtype, tracked=True)
        if self.use_bias:
            self._new_parameter(f"bias{suffix}", (self.out_features,), constant(0.0), device, dtype)
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
        if parallel == "column":
            x = (GatherSequence if self.sequence_parallel else CopyToGroup).apply(x, self.tp_group)
        y = F.linear(x, weight, bias if parallel != "row" else None)
        if parallel == "row":
            y = (ReduceScatterSequence if self.sequence_parallel else ReduceFromGroup).apply(y, self.tp_group)
            y = y if bias is None else y + bias
        return y


def _mark_tensor_parallel(parameter: nn.Parameter, dim: int) -> None:
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.partition_dim = dim  # type: ignore[attr-defined]
    parameter.partition_stride = 1  # type: ignore[attr-defined]
