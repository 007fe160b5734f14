"""vLLM's layers that quantize online, as staging.py uses them. Nothing else here knows how vLLM quantizes.

vLLM can load such a layer again (model_executor/model_loader/reload): each loader runs twice, once to
count elements and once to load, which takes seconds for a mixture of experts with thousands of tensors. This file uses
two parts of it. vLLM keeps a description of each layer's parameters as they were before the layer was quantized; and a
layer's quantization method makes of such parameters what its kernels read. Here it does so on a copy of the layer, and
the results are copied to where the kernels and captured CUDA graphs read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import wraps
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineMoEMethod
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

_PROCESSED = "_already_called_process_weights_after_loading"  # vLLM's mark of a layer that is quantized
_EXPERTS = ("w13_weight", "w2_weight")


def online_layers(model: torch.nn.Module, vllm_config: VllmConfig) -> list[VllmOnlineLayer]:
    """Return the layers of a loaded model that quantize what they load."""
    layers = []
    for name, module in model.named_modules():
        method = vars(module).get("quant_method")
        if isinstance(method, QuantizeMethodBase) and method.uses_meta_device:
            layers.append(VllmOnlineLayer(name, module, vllm_config))
    covered = {name for layer in layers for name in layer.parameters}
    eight_bits = {name for name, value in model.named_parameters() if value.itemsize == 1}
    if missed := sorted(eight_bits - covered):
        raise RuntimeError(
            f"vLLM holds {missed[0]} in 8 bits, and not by quantizing what it loads, so it cannot load the weights "
            "that the trainer sends; use a checkpoint in bfloat16"
        )
    return [layer for layer in layers if layer.parameters]


class VllmOnlineLayer:
    """A layer of vLLM that quantizes online. `module` has been loaded."""

    def __init__(self, name: str, module: torch.nn.Module, vllm_config: VllmConfig) -> None:
        self.name = name
        self._module = module
        self._vllm_config = vllm_config
        self._kernel_tensors: dict[str, torch.nn.Parameter | None] | None = None  # while the model's loaders run
        before, _ = get_layerwise_info(module).restore_metadata
        self._as_loaded = {*before, "bias"}  # not what quantizing adds; a bias is registered late
        self._before = {}  # without parameters that the layer holds as they were loaded, such as a bias
        for key, meta in before.items():
            now = module._parameters.get(key)
            if now is None or now.dtype != meta.dtype or now.shape != meta.shape:
                self._before[key] = meta
        self.parameters: Sequence[str] = [self._full(key) for key in self._before]

    def _full(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    def allocate(self) -> dict[str, torch.Tensor]:
        device = next(value.device for value in self._now.values() if value is not None)
        return {self._full(key): self._like(meta, device).zero_() for key, meta in self._before.items()}

    def _like(self, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a parameter with the class and the attributes that vLLM's loaders read."""
        tensor = torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device=device)
        tensor.__class__ = meta.__class__
        tensor.__dict__ = dict(meta.__dict__)
        restored: torch.Tensor = restore_layer_refs(tensor, self._module)
        return restored

    @contextmanager
    def loading(self, tensor: Callable[[str], torch.Tensor | None], loaded: Callable[[], None]) -> Iterator[None]:
        parameters = self._module._parameters
        placeholders = {key: self._placeholder(key, tensor, loaded) for key in self._before}
        self._kernel_tensors = kernel_tensors = dict(parameters)
        parameters.clear()
        parameters.update(self._with(placeholders))
        try:
            yield
        finally:
            self._kernel_tensors = None
            parameters.clear()
            parameters.update(kernel_tensors)

    @property
    def _now(self) -> Mapping[str, torch.nn.Parameter | None]:
        """The parameters that vLLM's kernels read."""
        return self._module._parameters if self._kernel_tensors is None else self._kernel_tensors

    def _with(self, before: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the parameters of the layer as before it was quantized, with these for those that are quantized."""
        return {key: value for key, value in self._now.items() if key in self._as_loaded} | dict(before)

    def _placeholder(self, key: str, tensor: Callable[[str], torch.Tensor | None], loaded: Callable[[], None]) -> Any:
        """Return a parameter without memory, whose loader writes to the staging tensor, or nowhere without one."""
        placeholder: Any = self._like(self._before[key], torch.device("meta"))
        loader = _get_original_loader(placeholder)
        name = self._full(key)

        @wraps(loader, assigned=("__doc__",))
        def load(param: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            staged = tensor(name)
            result = loader(placeholder if staged is None else staged, *args, **kwargs)
            if staged is not None:
                loaded()
            return result

        placeholder.weight_loader = load
        return placeholder

    @torch.no_grad()
    def quantize(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Quantize loaded parameters on a copy of the layer, and copy the results into the layer's own memory."""
        module = self._module
        scratch: Any = object.__new__(type(module))  # shares whatever quantizing does not change
        scratch.__dict__.update(vars(module))
        scratch.__dict__.pop(_PROCESSED, None)
        scratch.__dict__["_buffers"] = dict(module._buffers)
        scratch.__dict__["_parameters"] = self._with({key: tensors[self._full(key)] for key in self._before})
        scratch.quant_method = copy(module.quant_method)  # its kernel and its configuration are replaced
        with set_current_vllm_config(self._vllm_config):
            process_loaded(scratch)
        for key, value in (scratch._parameters | scratch._buffers).items():
            self._copy_result(key, value)
        _copy_derived(scratch.quant_method, module.quant_method, {id(scratch)})

    def _copy_result(self, key: str, value: torch.Tensor | None) -> None:
        now = self._now[key] if key in self._now else self._module._buffers.get(key)
        if value is now or value is None:
            return
        if now is None or now.shape != value.shape or now.dtype != value.dtype:
            made, read = ("nothing" if t is None else f"{t.dtype} {tuple(t.shape)}" for t in (value, now))
            raise RuntimeError(f"vLLM has quantized {self._full(key)} to {made}, and its kernels read {read}")
        now.data.copy_(value)


def process_loaded(layer: Any) -> None:
    """Run the quantization method of a layer on the weights that it has loaded.

    Weights of experts [experts, channels, inputs] are quantized in one call, where vLLM makes one for each expert.
    Every output channel has a separate scale, so the experts of a layer can be quantized as one expert that has the
    channels of all: the bits are the same. A sync of 48 layers of 128 experts has 96 matrices to quantize instead of
    12,288. Both 8-bit copies of all experts' w13 exist for a moment, before the result is copied to its place.
    """
    method = layer.quant_method
    if not isinstance(method, Fp8PtpcOnlineMoEMethod):
        method.process_weights_after_loading(layer)
        return
    experts = layer.local_num_experts
    set_up_kernel = method._setup_kernel
    loaded = {name: layer._parameters[name] for name in _EXPERTS}

    def set_up_with_experts_apart(layer: Any, *quantized: torch.Tensor, **inputs: Any) -> None:
        layer.local_num_experts = experts
        layer._parameters.update(loaded)
        set_up_kernel(layer, *(tensor.view(experts, -1, tensor.shape[-1]) for tensor in quantized), **inputs)

    layer.local_num_experts = 1
    layer._parameters.update({name: weight.data.view(1, -1, weight.shape[-1]) for name, weight in loaded.items()})
    method._setup_kernel = set_up_with_experts_apart
    method.process_weights_after_loading(layer)
    del method._setup_kernel  # a cycle, which would hold the loaded weights until Python collects garbage


def _copy_derived(new: object, now: object, seen: set[int]) -> None:
    """Copy tensors that a method has derived, such as a table of strides, to where they were: sleep discards them."""
    if new is now or type(new) is not type(now) or id(new) in seen:
        return
    seen.add(id(new))
    if isinstance(new, torch.Tensor) and isinstance(now, torch.Tensor):
        if new.shape == now.shape and new.dtype == now.dtype and new.data_ptr() != now.data_ptr():
            now.data.copy_(new)
        return
    theirs = _parts(now)
    for key, value in _parts(new).items():
        if key in theirs:
            _copy_derived(value, theirs[key], seen)


def _parts(value: object) -> Mapping[Any, object]:
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    return vars(value) if hasattr(value, "__dict__") else {}
