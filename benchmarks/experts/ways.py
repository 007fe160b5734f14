"""The ways to compute a block: each builds a layer, the products of all experts with their weights.

A layer is built from stacked weights and their gradient buffer; without a buffer the weights are frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.experts.hooks import hook_as_in_megatron, parameters_of
from benchmarks.experts.inputs import Loads, Weights
from benchmarks.experts.swiglu import swiglu_on

CUTLASS = "NVTE_USE_CUTLASS_GROUPED_GEMM"  # Transformer Engine reads it in every call


@dataclass(frozen=True)
class Layer:
    """The products of a layer, and the nodes of its parameters' hooks, which live as long as this does."""

    product: Callable[[torch.Tensor, Loads], torch.Tensor]
    nodes: Sequence[torch.autograd.graph.Node]


@dataclass(frozen=True)
class Block:
    """Compute fc1, SwiGLU and fc2 on tokens that are sorted by expert."""

    fc1: Layer
    fc2: Layer
    activation: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor, loads: Loads) -> torch.Tensor:
        return self.fc2.product(self.activation(self.fc1.product(x, loads)), loads)


def build_block(way: str, weights: Weights, trained: bool) -> Block:
    fc1 = WAYS[way](weights.fc1, weights.fc1_grad if trained else None)
    fc2 = WAYS[way](weights.fc2, weights.fc2_grad if trained else None)
    return Block(fc1, fc2, swiglu_on(weights.fc1.device))


def te_layer(stacked: torch.Tensor, main_grad: torch.Tensor | None) -> Layer:
    """Build Transformer Engine's layer, which has a weight per expert."""
    import transformer_engine.pytorch as te

    experts, out, width = stacked.shape
    trained = main_grad is not None
    # The stand-in on a CPU leaves all gradients to the hook.
    layer: Any = te.GroupedLinear(experts, width, out, bias=False, params_dtype=stacked.dtype, device=stacked.device,
                                  fuse_wgrad_accumulation=trained and stacked.is_cuda)  # fmt: skip
    nodes = []
    for expert in range(experts):
        parameter = getattr(layer, f"weight{expert}")
        parameter.data = stacked[expert]
        parameter.requires_grad_(trained)
        if main_grad is not None:
            nodes.append(hook_as_in_megatron(parameter, main_grad[expert]))

    def product(x: torch.Tensor, loads: Loads) -> torch.Tensor:
        y: torch.Tensor = layer(x, loads.counts)
        return y

    return Layer(product, nodes)


def grouped_layer(stacked: torch.Tensor, main_grad: torch.Tensor | None, gradients_have_hooks: bool) -> Layer:
    """Build the layer of this package (training/moe/grouped_experts.py)."""
    from swift_megatron_grpo.training.moe.grouped_experts import GroupedLinear

    def per_expert(*_: Any) -> Any:
        raise RuntimeError("a product per expert was asked for")

    parameters, nodes = parameters_of(stacked, main_grad)
    linear = GroupedLinear(per_expert, parameters, gradients_have_hooks)
    return Layer(lambda x, loads: linear(x, loads.counts)[0], nodes)


def loop_layer(stacked: torch.Tensor, main_grad: torch.Tensor | None) -> Layer:
    """Build a layer that computes one product after the other."""
    parameters, nodes = parameters_of(stacked, main_grad)

    def product(x: torch.Tensor, loads: Loads) -> torch.Tensor:
        return torch.cat([F.linear(*pair) for pair in zip(x.split(loads.counts), parameters, strict=True)])

    return Layer(product, nodes)


WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor | None], Layer]] = {
    "te": te_layer,
    "te cutlass": te_layer,  # in a process with the variable CUTLASS
    "stacked": partial(grouped_layer, gradients_have_hooks=False),
    "parameters": partial(grouped_layer, gradients_have_hooks=True),
    "loop": loop_layer,
}
