"""vLLM's FP8 of experts with one call for all of a layer, where vLLM makes one for each expert.

Every output channel has a scale of its own, so the experts of a layer can be quantized as one expert that has the
channels of all: the bits are the same. A sync of 48 layers of 128 experts has 96 matrices to quantize instead of
12,288; how many kernels a matrix takes depends on vLLM. A matrix is quantized into memory of its own and then copied to
its place, so both 8-bit copies of all experts' w13 exist for a moment.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineMoEMethod

_WEIGHTS = ("w13_weight", "w2_weight")


def process_loaded(layer: Any) -> None:
    """Run the quantization method of a layer on the weights that it has loaded."""
    if isinstance(layer.quant_method, Fp8PtpcOnlineMoEMethod):
        _process_as_one_expert(layer)
    else:
        layer.quant_method.process_weights_after_loading(layer)


def _process_as_one_expert(layer: Any) -> None:
    """Run the method of a layer whose weights are [experts, channels, inputs]."""
    method, experts = layer.quant_method, layer.local_num_experts
    set_up_kernel = method._setup_kernel
    loaded = {name: layer._parameters[name] for name in _WEIGHTS}

    def set_up_with_experts_apart(layer: Any, *quantized: torch.Tensor, **inputs: Any) -> None:
        layer.local_num_experts = experts
        layer._parameters.update(loaded)
        set_up_kernel(layer, *(tensor.view(experts, -1, tensor.shape[-1]) for tensor in quantized), **inputs)

    layer.local_num_experts = 1
    layer._parameters.update({name: weight.data.view(1, -1, weight.shape[-1]) for name, weight in loaded.items()})
    method._setup_kernel = set_up_with_experts_apart
    method.process_weights_after_loading(layer)
    del method._setup_kernel  # a cycle, which would hold the loaded weights until Python collects garbage
