"""Loads weights into the model of one vLLM worker, and reads them back.

The first load is traced (load_tracer.py). Later ones copy tensors to the places that it has shown: vLLM's loaders look
up each tensor by its name in Python, some 0.1 ms a tensor, and the 18,867 tensors of Qwen3-30B-A3B, three for each
expert, take longer there than on the wire. Layers that vLLM quantizes have staging tensors while their slices arrive
(staging.py).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from swift_megatron_grpo.weights.load.load_tracer import LoadTrace, Place, TracedCopy, loadable
from swift_megatron_grpo.weights.load.staging import OnlineLayer, Staging, Target
from swift_megatron_grpo.weights.transport.buckets import NamedWeights, copy_all
from swift_megatron_grpo.weights.transport.checksums import Batch, to_integers
from swift_megatron_grpo.weights.transport.held_weights import HeldSlice, TensorSlice, WorkerWeights

BATCH_BYTES = 2**28  # of tensors that wait to be copied together
_NAMED = 8  # parameters that a message names


Memories = dict[str, tuple[int, int]]  # address and bytes, by parameter


@dataclass(frozen=True)
class _Readable:
    """Slices of sent tensors that can be read back, again and again while parameters stay in their memories."""

    slices: dict[str, list[TensorSlice]]  # by the sent tensor
    checksums: Batch  # of all slices, one after the other
    memories: Memories

    def read(self) -> dict[str, tuple[HeldSlice, ...]]:
        numbers = iter(to_integers(self.checksums.sums()))
        return {name: tuple(HeldSlice(part, next(numbers)) for part in parts) for name, parts in self.slices.items()}


class LoadedWeights:
    """Loads weights into the model of one worker, and reads them back."""

    def __init__(self, model: Any, dtype: torch.dtype, engine: str, layers: Iterable[OnlineLayer] = ()) -> None:
        """`layers`: those that quantize what they load."""
        self._model = model
        self._dtype = dtype  # of the run; tensors of wider types are compared in it
        self._engine = engine
        self._staging = Staging(layers, dtype)
        self.is_new = True  # until a load has been traced
        self._trace = LoadTrace(model)
        self._repacked: set[str] = set()  # tensors that vLLM rearranges for a kernel after loading
        self._targets: dict[str, list[Target]] = {}  # of the parameters in these memories:
        self._memories: Memories = {}
        self._readable: _Readable | None = None  # what the last traced load has written
        self._as_written: dict[str, tuple[HeldSlice, ...]] = {}  # checksums of those, before they were rearranged

    def load(self, weights: NamedWeights, finish: Callable[[], None], collect_checksums: bool) -> None:
        """Load weights, and run `finish`, vLLM's processing of loaded weights.

        With `collect_checksums` the written tensors can be read back afterwards. The first such load is traced, and so
        are the next ones until a trace is complete. Layers that quantize cannot be loaded in another way before.
        """
        self._staging.begin(collect_checksums)
        if not self._trace.complete and (collect_checksums or self._staging.layers):
            self._load_traced(weights)
            copied = self._trace.copies if collect_checksums or self._trace.complete else ()
            written = self._find_readable(copied).read()
            finish()
            settled = self._find_readable(copied).read()
            self._as_written = {name: held for name, held in written.items() if settled.get(name) != held}
            self._repacked = set(self._as_written)
        else:
            self._write(weights)
            self._as_written = self._find_readable(self._repacked).read() if collect_checksums else {}
            finish()
        self._staging.open.clear()
        if not collect_checksums and (incomplete := self._staging.incomplete):
            more = f" and {len(incomplete) - _NAMED} more" if len(incomplete) > _NAMED else ""
            raise RuntimeError(f"not all weights of these layers have arrived: {', '.join(incomplete[:_NAMED])}{more}")

    # ---- the traced load

    def _load_traced(self, weights: NamedWeights) -> None:
        layers = self._staging.layers.values()
        self.is_new = False
        self._repacked = set()
        self._memories = {}
        self._readable = None
        with ExitStack() as loading:
            for layer in layers:
                loading.enter_context(
                    layer.loading(partial(self._staging_tensor, layer), partial(self._after_loader, layer))
                )
            self._trace = trace = LoadTrace(self._model)
            with trace:
                loaded = self._model.load_weights(trace.register(weights))
            trace.close(loaded)
            if trace.discarded and layers:
                raise RuntimeError("--rollout_quantization: vLLM loads weights of a layer again after all have arrived")
            if computed := sorted(trace.computed & self._staging.parameters):
                raise RuntimeError(
                    f"--rollout_quantization: vLLM computes {computed[0]} from what is sent, so its pieces cannot be "
                    "copied before they are quantized; use --rollout_quantization none for this model"
                )
            for layer in layers:  # padded: loaders have not written all
                if layer.name in self._staging.open and set(trace.unwritten).isdisjoint(layer.parameters):
                    self._quantize_traced(layer)
        self._staging.learn(trace.copies_to)

    def _staging_tensor(self, layer: OnlineLayer, parameter: str) -> torch.Tensor | None:
        if layer.name in self._staging.quantized:
            return None
        tensors = self._staging.tensors(layer)
        self._trace.adopt(tensors)
        return tensors[parameter]

    def _after_loader(self, layer: OnlineLayer) -> None:
        if all(map(self._trace.is_full, layer.parameters)):
            self._quantize_traced(layer)

    def _quantize_traced(self, layer: OnlineLayer) -> None:
        self._trace.release(self._staging.tensors(layer).values())
        copies = [copy for parameter in layer.parameters for copy in self._trace.copies_to[parameter]]
        self._staging.quantize(layer, copies)

    # ---- later loads

    def _write(self, weights: NamedWeights) -> None:
        """Copy tensors to the places that the trace has shown, and let the model load the others."""
        if not self._trace.complete:
            self._model.load_weights(weights)
            return
        self._find_targets()
        others = self._write_directly(weights)
        if len(self._targets) < len(self._trace.accepted) + len(self._trace.ignored):
            self._model.load_weights(others)
        elif (unknown := next(others, None)) is not None:
            raise RuntimeError(f"{unknown[0]} has arrived, which was not among the tensors of the traced load")

    def _find_targets(self) -> None:
        """Find out where each tensor goes that the model loads by nothing but copies, unless that is known.

        The model loads a tensor itself if it rearranges it, has replaced its parameter, or also pads the parameter:
        padding is lost with the weights when vLLM sleeps at level 2.
        """
        parameters = loadable(self._model)
        memories = _memories(parameters)
        if memories == self._memories:
            return
        copied = {name: value for name, value in parameters.items() if name not in self._trace.padded}
        staged = self._staging.targets()
        self._targets = {name: [] for name in self._trace.ignored}  # other workers hold them, such as experts
        for name, copies in self._trace.copies.items():
            fixed = self._unstaged(copies)
            if name not in self._repacked and all(_exists(copy.place, copied) for copy in fixed):
                views = [copy.place.view(parameters[copy.place.parameter]) for copy in fixed]
                known = [(copy.slice, lambda view=view: view) for copy, view in zip(fixed, views, strict=True)]
                self._targets[name] = [*known, *staged.get(name, ())]
        self._memories = memories

    def _write_directly(self, weights: NamedWeights) -> Iterator[tuple[str, torch.Tensor]]:
        """Copy each tensor to its targets, and yield those that have none. Consume the iterator to its end."""
        views: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        waiting = 0
        for name, tensor in weights:
            if name not in self._targets:
                yield name, tensor
                continue
            for part, view in self._targets[name]:
                views.append(view())
                sources.append(_slice_of(tensor, part))
            waiting += tensor.nbytes
            complete = self._staging.complete_with(name)
            if complete or waiting >= BATCH_BYTES:
                copy_all(views, sources)
                views.clear()
                sources.clear()
                waiting = 0
            for layer in complete:
                self._staging.quantize(layer)
        copy_all(views, sources)

    # ---- reading back

    def worker_weights(self) -> WorkerWeights:
        """Return what the model holds. Valid after a load that collected checksums."""
        if self._readable is None or self._readable.memories != _memories(loadable(self._model)):
            self._readable = self._find_readable(name for name in self._trace.copies if name not in self._repacked)
        held = self._readable.read() | self._as_written
        for name, slices in self._staging.held().items():
            held[name] = (*held.get(name, ()), *slices)
        unreadable = [name for name in self._trace.accepted if name not in held]
        unwritten = dict.fromkeys([*self._trace.unwritten, *self._staging.incomplete])
        return WorkerWeights(self._engine, held, tuple(self._trace.ignored), tuple(unwritten), tuple(unreadable))

    def _find_readable(self, names: Iterable[str]) -> _Readable:
        """Find where tensors are, but those of replaced parameters, and of layers that are quantized: Staging.held."""
        parameters = loadable(self._model)
        found: dict[str, list[TensorSlice]] = {}
        slices = []
        for name in names:
            copies = self._unstaged(self._trace.copies[name])
            if copies and all(_exists(copy.place, parameters) for copy in copies):
                found[name] = [copy.slice for copy in copies]
                slices += [(copy.place.view(parameters[copy.place.parameter]), copy.slice) for copy in copies]
        return _Readable(found, Batch(slices, self._dtype), _memories(parameters))

    def _unstaged(self, copies: Iterable[TracedCopy]) -> list[TracedCopy]:
        return [copy for copy in copies if copy.place.parameter not in self._staging.parameters]


def _memories(parameters: dict[str, torch.Tensor]) -> Memories:
    return {name: (value.data_ptr(), value.untyped_storage().nbytes()) for name, value in parameters.items()}


def _exists(place: Place, parameters: dict[str, torch.Tensor]) -> bool:
    parameter = parameters.get(place.parameter)
    return parameter is not None and parameter.untyped_storage().nbytes() == place.storage_bytes


def _slice_of(tensor: torch.Tensor, part: TensorSlice) -> torch.Tensor:
    if part.offset == 0 and part.shape == tensor.shape:
        return tensor
    whole = tensor.contiguous()
    return whole.as_strided(part.shape, part.strides, int(whole.storage_offset()) + part.offset)
