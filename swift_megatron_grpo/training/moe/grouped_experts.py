"""All experts of a layer in one kernel per product (--fast_kernels), in place of Transformer Engine's one per expert.

Transformer Engine makes lists of weights, inputs and gradients, and launches a product for each expert. On an H200 this
takes the host 13 ms for a layer of 64 experts, forward and backward, and 23 ms for 128, while the GPU needs 4 to 6 ms
for 8,192 tokens; torch's grouped product takes the host 1 ms (benchmarks/h200/parts/experts.json).

The grouped product reads the weights of all experts as one tensor. The parameters stay as they are, weight0, weight1
and so on, which checkpoints, adapters and the optimizer see; the tensor is a view of the memory in which they follow
each other. Megatron's buffers have parameters in the reverse of the order in which a module registers them, so they
are registered in reverse; a checkpoint remembers it (`experts_in_order` of its manifest), because the optimizer's state
is saved in the order of the buffers. Frozen ones are moved into separate memory.

Weight gradients of a micro batch are computed in the precision of the weights and added to Megatron's fp32 buffer.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import TEGroupedLinear

from swift_megatron_grpo.weights.stacked_tensors import stacked

ALIGNMENT = 16  # bytes, of the rows that the kernels read

logger = logging.getLogger(__name__)


def group_products(models: Iterable[torch.nn.Module], gradients_have_hooks: bool) -> None:
    """Install the products in all experts, before the models are wrapped, and register their weights in reverse.

    `gradients_have_hooks`: something waits for each weight's gradient, as --overlap_grad_reduce does.
    """
    for model in models:
        for module in model.modules():
            if not isinstance(module, TEGroupedLinear):
                continue
            weights = [getattr(module, f"weight{expert}") for expert in range(module.num_gemms)]
            config = module.config
            special = module.use_bias or config.fp8 or config.fp4 or config.delay_wgrad_compute
            if not special and len({weight.requires_grad for weight in weights}) == 1:
                module.forward = GroupedLinear(module.forward, weights, gradients_have_hooks)
                move_together(weights)  # the distributed optimizer moves trained ones again, into its buffer
            parameters = module._parameters
            for name in reversed(list(parameters)):
                parameters[name] = parameters.pop(name)


def move_together(weights: Sequence[torch.nn.Parameter]) -> None:
    """Give weights of one shape memory in which they follow each other."""
    together = torch.stack([weight.data for weight in weights])
    for weight, data in zip(weights, together, strict=True):
        weight.data = data


class GroupedLinear:
    """The forward of one layer's experts, in place of TEGroupedLinear's."""

    def __init__(
        self, per_expert: Callable[..., Any], weights: Sequence[torch.nn.Parameter], gradients_have_hooks: bool
    ) -> None:
        self._per_expert = per_expert
        self._weights = weights
        self._gradients_have_hooks = gradients_have_hooks
        self._warned = False

    def __call__(self, x: torch.Tensor, m_splits: Sequence[int]) -> tuple[torch.Tensor, None]:
        """Multiply x [tokens, in], sorted by expert; m_splits [experts] has the tokens of each."""
        weight = self._stacked(x)
        if weight is None:
            output: tuple[torch.Tensor, None] = self._per_expert(x, m_splits)
            return output
        x = x.contiguous()  # rows of the kernels' alignment
        ends = torch.tensor(m_splits, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(x.device, non_blocking=True)
        first = self._weights[0]
        if not (first.requires_grad and torch.is_grad_enabled()):
            return GroupedProduct.apply(x, weight, ends, None), None
        main_grad = None
        if not self._gradients_have_hooks:
            main_grad = stacked([weight.main_grad for weight in self._weights])  # type: ignore[attr-defined]
        parameters = self._weights if main_grad is None else [first]
        return GroupedProduct.apply(x, weight, ends, main_grad, *parameters), None

    def _stacked(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the weights as one tensor [experts, out, in]; None: the kernels cannot multiply x by them."""
        first = self._weights[0]
        if not kernels_take(x, first):
            return None
        weight = stacked(self._weights)
        if weight is None and not first.requires_grad:  # their memory was replaced since
            move_together(self._weights)
            weight = stacked(self._weights)
        if weight is None and not self._warned:
            self._warned = True
            logger.warning("weights of experts are not side by side in memory; each expert has a product of its own")
        return weight


def kernels_take(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return True if x [tokens, in] may be multiplied by experts' weights like this one, [out, in]."""
    if x.dtype != weight.dtype or not len(x):
        return False
    aligned = all(features * weight.element_size() % ALIGNMENT == 0 for features in weight.shape)
    return aligned and (not x.is_cuda or weight.dtype == torch.bfloat16)


class GroupedProduct(torch.autograd.Function):
    """Multiply the rows of each expert by its weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        ends: torch.Tensor,
        main_grad: torch.Tensor | None,
        *parameters: torch.nn.Parameter,
    ) -> torch.Tensor:
        """Multiply x [tokens, in] by weight [experts, out, in]; ends [experts] is where the rows of each expert end.

        Backward adds to main_grad [experts, out, in], or without it returns a gradient for each of `parameters`. With
        it, one parameter is enough, so that backward runs if x needs no gradient.
        """
        ctx.save_for_backward(x if parameters else None, weight, ends)
        ctx.main_grad = main_grad
        ctx.parameters = len(parameters)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        d_x = F.grouped_mm(grad, weight, offs=ends) if ctx.needs_input_grad[0] else None
        d_weights: tuple[torch.Tensor | None, ...] = (None,) * ctx.parameters
        if ctx.parameters:
            d_weight = F.grouped_mm(grad.t(), x, offs=ends)
            if ctx.main_grad is None:
                d_weights = d_weight.unbind()
            else:
                ctx.main_grad.add_(d_weight)
        return d_x, None, None, None, *d_weights
