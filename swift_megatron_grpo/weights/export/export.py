"""Exports the trained weights under checkpoint names, one after the other, through mcore-bridge.

LoRA is merged into the exported tensors only: while the bridge reads a layer, each adapted weight points to a separate
buffer with base + delta; afterwards it points to the base again, which is never written to. The matrix product adds the
weight itself, so that a merge reads and writes each weight once, and rounds once; separate sums in fp32 move 34 bytes
for a weight of two. The experts of a layer are one product, because Qwen3-30B-A3B has 12,288 of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from mcore_bridge import GPTBridge, LoraParallelLinear
from mcore_bridge.model import GPTModel
from peft.tuners.lora import LoraLayer

from swift_megatron_grpo.runtime.replaced import replaced
from swift_megatron_grpo.weights.export.host_flags import flags_on_host
from swift_megatron_grpo.weights.stacked_tensors import stacked
from swift_megatron_grpo.weights.transport.buckets import NamedWeights

ADAPTER = "default"


@dataclass(frozen=True, slots=True)
class AdaptedModules:
    """This rank's modules with an adapter, found once: finding them walks through all modules."""

    of_layer: dict[torch.nn.Module | None, list[LoraLayer]]
    elsewhere: list[LoraLayer]

    @classmethod
    def find(cls, bridge: GPTBridge, models: Sequence[GPTModel]) -> AdaptedModules:
        decoders = [model.language_model.decoder if bridge.is_multimodal else model.decoder for model in models]
        of_layer = {layer: _adapted(layer) for decoder in decoders for layer in decoder.layers}
        in_layers = {module for modules in of_layer.values() for module in modules}
        return cls(of_layer, [one for model in models for one in _adapted(model) if one not in in_layers])


class WeightExport:
    """Exports the same weights in every weight sync.

    `adapter_only`: the adapter's weights, without the base. `left_out`: name prefixes of frozen image, video or audio
    parts that no engine holds. `stored`: reads frozen tensors that engines hold and the trainer does not.
    """

    def __init__(
        self,
        bridge: GPTBridge,
        models: Sequence[GPTModel],
        adapter_only: bool = False,
        left_out: tuple[str, ...] = (),
        stored: Callable[[], NamedWeights] = tuple,
    ) -> None:
        self._bridge = bridge
        self._models = list(models)
        self._left_out = left_out
        self._stored = stored
        self._adapted = AdaptedModules.find(bridge, models)
        self._merged: set[LoraLayer] = set()
        self.adapter = adapter_config(models[0]) if adapter_only else None  # an engine needs it to run the adapter

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.adapter is not None:
            return export_adapter(self._bridge, self._models)
        return self._held(export_weights(self._bridge, self._models, self._adapted, self._merged))

    def base(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Export the frozen weights below the adapter, for an engine that has discarded them."""
        return self._held(export_weights(self._bridge, self._models, AdaptedModules({}, [])))

    def _held(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, tensor) for name, tensor in weights if not name.startswith(self._left_out))
        yield from self._stored()

    def pop_merged_count(self) -> int:
        """Return the number of this rank's modules exported with a merged adapter since the last call."""
        count = len(self._merged)
        self._merged.clear()
        return count

    @property
    def adapted_count(self) -> int:
        """Number of modules of this rank that have an adapter."""
        return len(self._adapted.elsewhere) + sum(map(len, self._adapted.of_layer.values()))


def export_weights(
    bridge: GPTBridge,
    models: Sequence[GPTModel],
    adapted: AdaptedModules | None = None,
    merged: set[LoraLayer] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Export all weights, with adapters merged, on all ranks together.

    Shards are gathered as the iterator advances; every rank gets every tensor. `adapted`: None to find them. Modules
    are added to `merged` once their adapter is merged.
    """
    with merged_on_read(bridge, adapted or AdaptedModules.find(bridge, models), merged):
        yield from bridge.export_weights(list(models), skip_unsupported_export=True)


def export_adapter(bridge: GPTBridge, models: Sequence[GPTModel]) -> Iterator[tuple[str, torch.Tensor]]:
    """Export the adapter's weights under peft's names, on all ranks together."""
    exported = False
    for name, tensor in bridge.export_weights(list(models), peft_format=True, adapter_name=ADAPTER):
        exported = True
        yield name, tensor
    if not exported:
        raise RuntimeError("the adapter has no weights to export; check --target_modules")


def adapter_config(model: GPTModel) -> dict[str, Any]:
    """Return the part of peft's configuration that an engine needs to run the adapter, in JSON types."""
    config = model.peft_config[ADAPTER]
    targets = config.target_modules
    return {
        **{name: getattr(config, name) for name in ("r", "lora_alpha", "use_rslora", "bias")},
        "target_modules": targets if isinstance(targets, str) else sorted(targets or []),
        "modules_to_save": config.modules_to_save and list(config.modules_to_save),
    }


@contextmanager
def merged_on_read(bridge: GPTBridge, adapted: AdaptedModules, merged: set[LoraLayer] | None = None) -> Iterator[None]:
    """Merge adapters into everything that the bridge exports inside the context, one layer at a time."""
    merged = set() if merged is None else merged
    convert_layer = bridge._set_layer_state
    on_host = flags_on_host(bridge)

    def convert_merged_layer(layer: torch.nn.Module | None, *args: Any, **kwargs: Any) -> Any:
        # The layer is None if another pipeline stage holds it.
        with _merged(adapted.of_layer.get(layer, ()), merged), on_host():
            return convert_layer(layer, *args, **kwargs)

    with _merged(adapted.elsewhere, merged), replaced(bridge, "_set_layer_state", convert_merged_layer):
        yield


def _adapted(module: torch.nn.Module) -> list[LoraLayer]:
    return [part for part in module.modules() if isinstance(part, LoraLayer)]


@contextmanager
def _merged(modules: Iterable[LoraLayer], merged: set[LoraLayer]) -> Iterator[None]:
    """Point the weights of `modules` to base + delta inside the context, and add the modules to `merged`."""
    bases: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    with torch.no_grad():
        for module in modules:
            for weight, value in merged_weights(module, ADAPTER):
                bases.append((weight, weight.data))
                weight.data = value
            merged.add(module)
    try:
        yield
    finally:
        for weight, base in bases:
            weight.data = base


def merged_weights(module: LoraLayer, adapter: str) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Return the frozen weights of a module, each with its merged value in new memory."""
    base = module.get_base_layer()
    if not isinstance(module, LoraParallelLinear):  # in a vision tower, which is a model of transformers
        delta = module.get_delta_weight(adapter).float()
        return [(base.weight, (base.weight.data.float() + delta).to(base.weight.dtype))]
    layers = (base, module.lora_A[adapter], module.lora_B[adapter])
    names = [f"weight{expert}" for expert in range(base.num_gemms)] if module.is_grouped else ["weight"]
    bases, downs, ups = ([getattr(layer, name) for name in names] for layer in layers)
    return list(zip(bases, merge(bases, downs, ups, module.scaling[adapter]), strict=True))


@torch.no_grad()
def merge(
    bases: Sequence[torch.Tensor], downs: Sequence[torch.Tensor], ups: Sequence[torch.Tensor], scaling: float
) -> Sequence[torch.Tensor]:
    """Return base + scaling * up @ down for each base [out, in], down [rank, in] and up [out, rank]."""
    if not bases[0].dtype == downs[0].dtype == ups[0].dtype:  # a router in fp32 under an adapter in bf16
        deltas = [up.float() @ down.float() for up, down in zip(ups, downs, strict=True)]
        return [(base.float() + scaling * delta).to(base.dtype) for base, delta in zip(bases, deltas, strict=True)]
    if len(bases) > 1:
        base = stacked(bases)
        down = stacked(downs)
        up = stacked(ups)
        if base is not None and down is not None and up is not None:
            return torch.baddbmm(base, up, down, alpha=scaling).unbind()
    return [torch.addmm(*tensors, alpha=scaling) for tensors in zip(bases, ups, downs, strict=True)]
