"""Layers that vLLM quantizes: tensors in the precision of the training, for as long as slices of a layer arrive.

Such a layer holds its weights quantized only. A sync therefore collects the slices of a layer in staging tensors, which
have the shapes and the layout that the layer had before it was quantized. Once all slices are there, their checksums
are taken, the layer is quantized in place, and the staging tensors are freed. If tensors arrive layer by layer, as the
trainer sends them, they take the memory of one layer.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch

from swift_megatron_grpo.weights.load.load_tracer import Place, TracedCopy
from swift_megatron_grpo.weights.transport.checksums import Checksums
from swift_megatron_grpo.weights.transport.held_weights import HeldSlice, TensorSlice

Target = tuple[TensorSlice, Callable[[], torch.Tensor]]  # a slice of a sent tensor, and the place that holds it


class OnlineLayer(Protocol):
    """A layer that quantizes weights after they are loaded."""

    name: str
    parameters: Sequence[str]  # names, in the model, of those that are quantized

    def allocate(self) -> dict[str, torch.Tensor]:
        """Return those parameters as they are before quantizing, with zeros, because loaders leave padding."""

    def quantize(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Quantize loaded parameters into the memory of the layer that vLLM's kernels read."""

    def loading(
        self, tensor: Callable[[str], torch.Tensor | None], loaded: Callable[[], None]
    ) -> AbstractContextManager[None]:
        """Let the model's loaders write to staging tensors inside the context.

        `tensor` returns the staging tensor of a parameter, or None once the layer is quantized; `loaded` is called
        after each loader that may have written to it.
        """


class Staging:
    """The staging tensors of a model's layers during one load after another."""

    def __init__(self, layers: Iterable[OnlineLayer], dtype: torch.dtype) -> None:
        self.layers = {layer.name: layer for layer in layers}
        self._dtype = dtype  # of the run: checksums of wider tensors are taken in it
        self._layer_of = {name: layer for layer in self.layers.values() for name in layer.parameters}
        self.parameters = frozenset(self._layer_of)  # names of those that are quantized
        self.open: dict[str, dict[str, torch.Tensor]] = {}  # by layer that still waits for slices
        self._copies: dict[str, list[TracedCopy]] = {}  # by layer, as a load has shown
        self._layers_of: dict[str, set[str]] = {}  # by the name of a sent tensor
        self._missing: dict[str, set[str]] = {}  # sent tensors that a layer waits for, in this load
        self.quantized: set[str] = set()  # layers, in this load
        self._collects = False
        self._read: list[tuple[str, TensorSlice]] = []  # whose checksums this load has taken
        self._checksums = Checksums(dtype)

    @property
    def incomplete(self) -> list[str]:
        """Parameters that this load has not quantized, because some of their slices have not arrived."""
        return [name for name, layer in self._layer_of.items() if layer.name not in self.quantized]

    def begin(self, collect_checksums: bool) -> None:
        self.open = {}
        self.quantized = set()
        self._read = []
        self._checksums = Checksums(self._dtype)
        self._collects = collect_checksums
        self._missing = {name: {copy.sent for copy in copies} for name, copies in self._copies.items()}

    def tensors(self, layer: OnlineLayer) -> dict[str, torch.Tensor]:
        """Return the staging tensors of a layer, by parameter. They exist from the first slice of the layer on."""
        if layer.name in self.quantized:
            raise RuntimeError(f"weights of vLLM's layer {layer.name} have arrived after all its weights had")
        if layer.name not in self.open:
            self.open[layer.name] = layer.allocate()
        return self.open[layer.name]

    def learn(self, copies: Mapping[str, Sequence[TracedCopy]]) -> None:
        """Remember, by parameter, where a load has written to."""
        self._layers_of = defaultdict(set)
        for name, layer in self.layers.items():
            self._copies[name] = [copy for parameter in layer.parameters for copy in copies.get(parameter, ())]
            for copy in self._copies[name]:
                self._layers_of[copy.sent].add(name)

    def targets(self) -> dict[str, list[Target]]:
        """Return where each sent tensor goes that goes to a layer here."""
        found = defaultdict[str, list[Target]](list)
        for copies in self._copies.values():
            for copy in copies:
                found[copy.sent].append((copy.slice, partial(self._staged, copy.place)))
        return found

    def _staged(self, place: Place) -> torch.Tensor:
        return place.view(self.tensors(self._layer_of[place.parameter])[place.parameter])

    def complete_with(self, sent: str) -> list[OnlineLayer]:
        """Note that a tensor has arrived. Return the layers whose last slice it was."""
        layers = sorted(self._layers_of.get(sent, ()))
        for name in layers:
            self._missing[name].discard(sent)
        return [self.layers[name] for name in layers if not self._missing[name]]

    def quantize(self, layer: OnlineLayer, copies: Sequence[TracedCopy] | None = None) -> None:
        """Take checksums of a layer's slices, quantize it and free its staging tensors.

        `copies`: where this load has written to; None: where the traced load had.
        """
        tensors = self.open.pop(layer.name)
        if self._collects:
            for copy in self._copies[layer.name] if copies is None else copies:
                held = copy.place.view(tensors[copy.place.parameter])
                self._read.append((copy.sent, copy.slice))
                self._checksums.add(held, copy.slice)
            self._checksums.launch()
        layer.quantize(tensors)
        self.quantized.add(layer.name)

    def held(self) -> dict[str, list[HeldSlice]]:
        """Return the checksums that this load has collected, by the name of the sent tensor."""
        found = defaultdict[str, list[HeldSlice]](list)
        for (sent, part), number in zip(self._read, self._checksums.integers(), strict=True):
            found[sent].append(HeldSlice(part, number))
        return found
