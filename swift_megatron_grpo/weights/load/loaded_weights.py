"""Loads weights into the model of one vLLM worker, and reads them back.

The first load is traced (load_tracer.py). Later ones copy tensors to the places that it has shown (direct_load.py).
Layers that vLLM quantizes have staging tensors while their slices arrive (staging.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from swift_megatron_grpo.weights.load.direct_load import Target, write_directly
from swift_megatron_grpo.weights.load.load_tracer import LoadTrace, Place, TracedCopy
from swift_megatron_grpo.weights.load.staging import OnlineLayer, Staging
from swift_megatron_grpo.weights.transport.buckets import NamedWeights
from swift_megatron_grpo.weights.transport.held_weights import HeldSlice, WorkerWeights, checksum, to_integers

_NAMED = 8  # parameters that a message names


class LoadedWeights:
    """Loads weights into the model of one worker, and reads them back."""

    def __init__(self, model: Any, dtype: torch.dtype, engine: str, layers: Iterable[OnlineLayer] = ()) -> None:
        """`layers`: those that quantize what they load."""
        self._model = model
        self._dtype = dtype  # of the run; tensors of wider types are compared in it
        self._engine = engine
        self._staging = Staging(layers, dtype)
        self._trace: LoadTrace | None = None
        self._repacked: set[str] = set()  # tensors that vLLM rearranges for a kernel after loading
        self._targets: dict[str, list[Target]] = {}  # of the parameters in these memories:
        self._memories: dict[str, tuple[int, int]] = {}  # address and bytes
        self._as_written: dict[str, tuple[HeldSlice, ...]] = {}  # checksums of those, before they were rearranged

    @property
    def is_new(self) -> bool:
        """True until a load has collected checksums."""
        return self._trace is None

    def load(self, weights: NamedWeights, finish: Callable[[], None], collect_checksums: bool) -> None:
        """Load weights, and run `finish`, vLLM's processing of loaded weights.

        With `collect_checksums` the written tensors can be read back afterwards. The first such load is traced, and so
        are the next ones until a trace is complete. Layers that quantize cannot be loaded in another way before.
        """
        self._as_written = {}
        self._staging.begin(collect_checksums)
        traced = self._trace is not None and self._trace.complete
        if not traced and (collect_checksums or self._staging.layers):
            trace = self._load_traced(weights)
            read = trace.copies if collect_checksums or trace.complete else ()
            written = self._read(read)
            finish()
            settled = self._read(read)
            self._as_written = {name: held for name, held in written.items() if settled.get(name) != held}
            self._repacked = set(self._as_written)
        else:
            self._write(weights)
            self._as_written = self._read(self._repacked) if collect_checksums else {}
            finish()
        self._staging.end()
        if not collect_checksums and (incomplete := self._staging.incomplete):
            more = f" and {len(incomplete) - _NAMED} more" if len(incomplete) > _NAMED else ""
            raise RuntimeError(f"not all weights of these layers have arrived: {', '.join(incomplete[:_NAMED])}{more}")

    # ---- the traced load

    def _load_traced(self, weights: NamedWeights) -> LoadTrace:
        with ExitStack() as loading:
            for layer in self._staging.layers:
                loading.enter_context(layer.loading(self._staging_tensor, self._after_loader))
            self._trace = trace = LoadTrace(self._model)
            self._repacked = set()
            self._memories = {}
            with trace:
                loaded = self._model.load_weights(trace.register(weights))
            trace.close(loaded)
            if trace.discarded and self._staging.layers:
                raise RuntimeError("--rollout_quantization: vLLM loads weights of a layer again after all have arrived")
            computed = sorted(trace.computed & self._staging.parameters)
            if computed:
                raise RuntimeError(
                    f"--rollout_quantization: vLLM computes {computed[0]} from what is sent, so its pieces cannot be "
                    "copied before they are quantized; use --rollout_quantization none for this model"
                )
            for name in self._staging.parameters - set(trace.unwritten):  # padded: loaders have not written all
                if self._staging.is_open(name) and not self._unwritten_beside(name):
                    self._quantize_traced(name)
        self._staging.learn(trace.copies_to)
        return trace

    def _unwritten_beside(self, parameter: str) -> bool:
        assert self._trace is not None
        return not set(self._trace.unwritten).isdisjoint(self._staging.parameters_beside(parameter))

    def _staging_tensor(self, parameter: str) -> torch.Tensor | None:
        assert self._trace is not None
        if self._staging.is_quantized(parameter):
            return None
        if not self._staging.is_open(parameter):
            self._trace.adopt(self._staging.tensors_beside(parameter))
        return self._staging.tensor(parameter)

    def _after_loader(self, parameter: str) -> None:
        assert self._trace is not None
        if all(map(self._trace.is_full, self._staging.parameters_beside(parameter))):
            self._quantize_traced(parameter)

    def _quantize_traced(self, parameter: str) -> None:
        assert self._trace is not None
        self._trace.release(self._staging.tensors_beside(parameter).values())
        copies = [copy for name in self._staging.parameters_beside(parameter) for copy in self._trace.copies_to[name]]
        self._staging.quantize_layer_of(parameter, copies)

    # ---- later loads

    def _write(self, weights: NamedWeights) -> None:
        """Copy tensors to the places that the trace has shown, and let the model load the others."""
        if self._trace is None or not self._trace.complete:
            self._model.load_weights(weights)
            return
        self._find_targets()
        others = write_directly(weights, self._targets, self._staging.complete_with, self._staging.quantize)
        if len(self._targets) < len(self._trace.accepted) + len(self._trace.ignored):
            self._model.load_weights(others)
        elif (unknown := next(others, None)) is not None:
            raise RuntimeError(f"{unknown[0]} has arrived, which was not among the tensors of the traced load")

    def _find_targets(self) -> None:
        """Find out where each tensor goes that the model loads by nothing but copies, unless that is known.

        The model loads a tensor itself if it rearranges it, has replaced its parameter, or also pads the parameter:
        padding is lost with the weights when vLLM sleeps at level 2.
        """
        assert self._trace is not None
        parameters = dict(self._model.named_parameters())
        memories = {name: (value.data_ptr(), value.untyped_storage().nbytes()) for name, value in parameters.items()}
        if memories == self._memories:
            return
        copied = {name: value for name, value in parameters.items() if name not in self._trace.padded}
        staged = self._staging.targets()
        self._targets = {name: [] for name in self._trace.ignored}  # other workers hold them, such as experts
        for name, copies in self._trace.copies.items():
            fixed = self._unstaged(copies)
            if name not in self._repacked and all(_exists(copy.place, copied) for copy in fixed):
                views = [copy.place.view(parameters[copy.place.parameter]) for copy in fixed]
                known = [(copy.slice, partial(_itself, view)) for copy, view in zip(fixed, views, strict=True)]
                self._targets[name] = [*known, *staged.get(name, ())]
        self._memories = memories

    # ---- reading back

    def worker_weights(self) -> WorkerWeights:
        """Return what the model holds. Valid after a load that collected checksums."""
        assert self._trace is not None
        held = self._read(name for name in self._trace.copies if name not in self._repacked) | self._as_written
        for name, slices in self._staging.held().items():
            held[name] = (*held.get(name, ()), *slices)
        unreadable = [name for name in self._trace.accepted if name not in held]
        unwritten = dict.fromkeys([*self._trace.unwritten, *self._staging.incomplete])
        return WorkerWeights(self._engine, held, tuple(self._trace.ignored), tuple(unwritten), tuple(unreadable))

    def _read(self, names: Iterable[str]) -> dict[str, tuple[HeldSlice, ...]]:
        """Read the checksums of these tensors, without tensors whose parameters have been replaced since the trace.

        Tensors of layers that are quantized are not read here: see Staging.held.
        """
        assert self._trace is not None
        parameters = dict(self._model.named_parameters())
        traced = {name: self._unstaged(self._trace.copies[name]) for name in names}
        present = {
            name: copies
            for name, copies in traced.items()
            if copies and all(_exists(c.place, parameters) for c in copies)
        }
        numbers = iter(
            to_integers(
                checksum(copy.place.view(parameters[copy.place.parameter]), self._dtype, copy.slice)
                for copies in present.values()
                for copy in copies
            )
        )
        return {
            name: tuple(HeldSlice(copy.slice, next(numbers)) for copy in copies) for name, copies in present.items()
        }

    def _unstaged(self, copies: Iterable[TracedCopy]) -> list[TracedCopy]:
        return [copy for copy in copies if copy.place.parameter not in self._staging.parameters]


def _itself(view: torch.Tensor) -> torch.Tensor:
    return view


def _exists(place: Place, parameters: dict[str, torch.nn.Parameter]) -> bool:
    parameter = parameters.get(place.parameter)
    return parameter is not None and parameter.untyped_storage().nbytes() == place.storage_bytes
