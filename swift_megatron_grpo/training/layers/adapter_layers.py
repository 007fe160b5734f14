"""Linear layers whose LoRA adapter adds its products to the layer's output in place (--fast_kernels).

mcore-bridge computes the output of an adapter, scales it and adds it to the output of the frozen layer: six passes over
memory of that size, and as many over its gradient; autograd then adds the two gradients of the input. On an H200,
kernels that scale and add, residuals included, took 0.34 s of the 3.3 s of an 8B model's train phase. Here the product
with B adds to the frozen layer's output in place, the product with A adds to the input's gradient in place, and the
scale is applied to the narrow tensor between A and B, [tokens, rank].

This covers frozen dense layers without tensor parallelism; layers of experts only scale the narrow tensor. A layer with
dropout, fp8, or not exactly one active adapter, as in a pass of the reference model, runs as in mcore-bridge.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from mcore_bridge import LoraParallelLinear
from megatron.core.extensions.transformer_engine import TEGroupedLinear, TELayerNormColumnParallelLinear, TELinear

from swift_megatron_grpo.training.layers.fast_kernels import NormSettings, RMSNorm

Forward = Callable[..., Any]


def add_adapters_in_place(models: Iterable[torch.nn.Module], gradients_have_hooks: bool) -> None:
    """Install the layers, before the models are wrapped and before anything else replaces a forward.

    `gradients_have_hooks`: something waits for each weight's gradient, as --overlap_grad_reduce does.
    """
    for model in models:
        for module in model.modules():
            if not isinstance(module, LoraParallelLinear) or module.config.fp8 or module.config.delay_wgrad_compute:
                continue
            if isinstance(module.base_layer, TEGroupedLinear):
                module.forward = partial(_experts, module, module.forward)
            elif _is_plain(module):
                module.forward = partial(_dense, module, module.forward, gradients_have_hooks)


def _is_plain(module: LoraParallelLinear) -> bool:
    base = module.base_layer
    normalizes = isinstance(base, TELayerNormColumnParallelLinear)
    if not (isinstance(base, TELinear) or (normalizes and base.normalization == "RMSNorm")):
        return False
    trained = base.weight.requires_grad or (base.use_bias and base.bias.requires_grad)
    return module.tp_size == 1 and not trained


def _active_adapter(module: LoraParallelLinear) -> str | None:
    """Return the one adapter that is added; None: there is another number of them, or the layer has them merged."""
    names = [name for name in module.active_adapters if name in module.lora_A]
    return names[0] if len(names) == 1 and not module.disable_adapters and not module.merged else None


def _experts(module: LoraParallelLinear, original: Forward, x: torch.Tensor, m_splits: Sequence[int]) -> Any:
    """Multiply x [tokens, in], sorted by expert."""
    name = _active_adapter(module)
    if name is None or module.lora_A[name].weight0.dtype != x.dtype:
        return original(x, m_splits)
    output, bias = module.base_layer(x, m_splits)
    narrow, _ = module.lora_A[name](module.lora_dropout[name](x), m_splits)
    wide, _ = module.lora_B[name](narrow * module.scaling[name], m_splits)
    return output + wide, bias


def _dense(
    module: LoraParallelLinear,
    original: Forward,
    gradients_have_hooks: bool,
    x: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Multiply x [tokens, batch, in] and return the layer's output and bias, as Megatron's linear layers do."""
    name = _active_adapter(module)
    if args or kwargs or name is None or not _is_supported(module, name, x):
        return original(x, *args, **kwargs)
    base = module.base_layer
    down = module.lora_A[name].weight
    up = module.lora_B[name].weight
    if isinstance(base, TELayerNormColumnParallelLinear):
        x = _normalized(base, x)
    bias = base.bias if base.use_bias else None
    output = AdaptedProduct.apply(
        x, base.weight, None if base.te_return_bias else bias, down, up, module.scaling[name], gradients_have_hooks
    )
    return output, bias if base.te_return_bias else None


def _is_supported(module: LoraParallelLinear, name: str, x: torch.Tensor) -> bool:
    down = module.lora_A[name]
    up = module.lora_B[name]
    dropout = module.lora_dropout[name]
    drops = module.training and not isinstance(dropout, torch.nn.Identity)
    one_dtype = x.dtype == module.base_layer.weight.dtype == down.weight.dtype == up.weight.dtype
    return one_dtype and not (drops or down.use_bias or up.use_bias or torch.is_autocast_enabled())


def _normalized(base: Any, x: torch.Tensor) -> torch.Tensor:
    weight = base.layer_norm_weight
    if x.is_cuda:
        settings = NormSettings(base.eps, base.zero_centered_gamma, base.fwd_ln_sm_margin, base.bwd_ln_sm_margin)
        normalized: torch.Tensor = RMSNorm.apply(x, weight, settings)
        return normalized
    scale = weight.float() + 1 if base.zero_centered_gamma else weight.float()
    return F.rms_norm(x.float(), scale.shape, scale, base.eps).to(x.dtype)


class AdaptedProduct(torch.autograd.Function):
    """x @ (weight + scaling * up @ down).T + bias, where weight and bias are frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        down: torch.nn.Parameter,
        up: torch.nn.Parameter,
        scaling: float,
        gradients_have_hooks: bool,
    ) -> torch.Tensor:
        """Multiply x [..., in] by weight [out, in], down [rank, in] and up [out, rank]."""
        rows = x.reshape(-1, x.shape[-1])
        narrow = (rows @ down.t()).mul_(scaling)
        output = F.linear(rows, weight, bias).addmm_(narrow, up.t())
        ctx.save_for_backward(rows, narrow, weight, down, up)
        ctx.scaling = scaling
        ctx.gradients_have_hooks = gradients_have_hooks
        return output.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, narrow, weight, down, up = ctx.saved_tensors
        grad_rows = grad.reshape(-1, grad.shape[-1])
        d_narrow = (grad_rows @ up).mul_(ctx.scaling)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = (grad_rows @ weight).addmm_(d_narrow, down).view(*grad.shape[:-1], weight.shape[1])
        d_down = _weight_gradient(ctx, 3, down, d_narrow, rows)
        d_up = _weight_gradient(ctx, 4, up, grad_rows, narrow)
        return d_x, None, None, d_down, d_up, None, None


def _weight_gradient(
    ctx: Any, place: int, parameter: torch.nn.Parameter, d_output: torch.Tensor, x: torch.Tensor
) -> torch.Tensor | None:
    """Return d_output.T @ x, or add it to Megatron's fp32 buffer and return None."""
    if not ctx.needs_input_grad[place]:
        return None
    if d_output.is_cuda and d_output.dtype != torch.float32:
        gradient = torch.mm(d_output.t(), x, out_dtype=torch.float32)
    else:
        gradient = d_output.t() @ x
    if ctx.gradients_have_hooks:
        return gradient.to(parameter.dtype)
    parameter.main_grad.add_(gradient)  # type: ignore[attr-defined]
    return None
