"""Traces how vLLM loads weights, so that the loaded tensors can be read back and compared.

vLLM fuses q, k and v, stacks experts, shards for tensor parallelism and pads, differently for every architecture. This
file contains no architecture: it traces the first load, in which each copy into a parameter shows which slice of which
tensor is written where.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swift_megatron_grpo.protocol.buckets import NamedWeights
from swift_megatron_grpo.protocol.held_weights import HeldSlice, TensorSlice, WorkerWeights, checksum, to_integers
from swift_megatron_grpo.vllm_shared.direct_load import Destination, write_directly


@dataclass(frozen=True, slots=True)
class _Place:
    """Location of a slice in the model."""

    parameter: str
    offset: int  # in elements of the parameter's storage
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_bytes: int

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def last(self) -> int:
        """Offset of its last element."""
        return self.offset + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True, slots=True)
class _Sent:
    """A tensor that is passed to the model's load_weights."""

    name: str
    storage: int
    begin: int  # in bytes: tensors of several types may share a storage
    nbytes: int


class LoadedWeights:
    """Loads weights into the model of one worker, and reads them back."""

    def __init__(self, model: Any, dtype: torch.dtype, engine: str) -> None:
        self._model = model
        self._dtype = dtype  # of the run; tensors of wider types are compared in it
        self._engine = engine
        self._trace: _LoadTrace | None = None
        self._repacked: set[str] = set()  # tensors that vLLM rearranges for a kernel after loading
        self._destinations: dict[str, list[Destination]] = {}  # of the parameters in these memories:
        self._memories: dict[str, tuple[int, int]] = {}  # address and bytes
        self._as_written: dict[str, tuple[HeldSlice, ...]] = {}  # checksums of those, before they were rearranged

    @property
    def is_new(self) -> bool:
        """True until a load has collected checksums."""
        return self._trace is None

    def load(self, weights: NamedWeights, finish: Callable[[], None], collect_checksums: bool) -> None:
        """Load weights, and run `finish`, vLLM's processing of loaded weights.

        With `collect_checksums` the written tensors can be read back afterwards. The first such load is traced, and so
        are the next ones until a trace is complete.
        """
        self._as_written = {}
        if not collect_checksums:
            self._write(weights)
            finish()
        elif self._trace is None or not self._trace.complete:
            self._trace, self._repacked, self._memories = _LoadTrace(self._model), set(), {}
            with self._trace:
                loaded = self._model.load_weights(self._trace.register(weights))
            self._trace.close(loaded)
            written = self._read(self._trace.pieces)
            finish()
            settled = self._read(self._trace.pieces)
            self._as_written = {name: held for name, held in written.items() if settled.get(name) != held}
            self._repacked = set(self._as_written)
        else:
            self._write(weights)
            self._as_written = self._read(self._repacked)
            finish()

    def _write(self, weights: NamedWeights) -> None:
        """Copy tensors to the places that the trace has shown, and let the model load the others."""
        if self._trace is None or not self._trace.complete:
            self._model.load_weights(weights)
            return
        self._find_destinations()
        others = write_directly(weights, self._destinations)
        if len(self._destinations) < len(self._trace.accepted):
            self._model.load_weights(others)
        elif (unknown := next(others, None)) is not None:
            raise RuntimeError(f"{unknown[0]} has arrived, which was not among the tensors of the traced load")

    def _find_destinations(self) -> None:
        """Find out where each tensor goes that the model loads by nothing but copies, unless that is known.

        The model loads the others: those that it rearranges, those whose parameters it has replaced, and those whose
        parameters it also pads, because the padding is lost with the weights when vLLM sleeps at level 2.
        """
        assert self._trace is not None
        parameters = dict(self._model.named_parameters())
        memories = {name: (value.data_ptr(), value.untyped_storage().nbytes()) for name, value in parameters.items()}
        if memories == self._memories:
            return
        copied = {name: value for name, value in parameters.items() if name not in self._trace.padded}
        self._destinations = {
            name: [Destination(piece, _view(place, copied)) for piece, place in pieces]
            for name, pieces in self._trace.pieces.items()
            if name not in self._repacked and all(_exists(place, copied) for _, place in pieces)
        }
        self._memories = memories

    def worker_weights(self) -> WorkerWeights:
        """Return what the model holds. Valid after a load that collected checksums."""
        assert self._trace is not None
        held = self._read(name for name in self._trace.pieces if name not in self._repacked) | self._as_written
        unreadable = [name for name in self._trace.accepted if name not in held]
        return WorkerWeights(
            self._engine, held, tuple(self._trace.ignored), tuple(self._trace.unwritten), tuple(unreadable)
        )

    def _read(self, names: Iterable[str]) -> dict[str, tuple[HeldSlice, ...]]:
        """Read the checksums of these tensors, without tensors whose parameters have been replaced since the trace."""
        assert self._trace is not None
        parameters = dict(self._model.named_parameters())
        traced = {name: self._trace.pieces[name] for name in names}
        present = {
            name: pieces for name, pieces in traced.items() if all(_exists(place, parameters) for _, place in pieces)
        }
        numbers = iter(
            to_integers(
                checksum(_view(place, parameters), self._dtype, piece)
                for pieces in present.values()
                for piece, place in pieces
            )
        )
        return {name: tuple(HeldSlice(piece, next(numbers)) for piece, _ in pieces) for name, pieces in present.items()}


class _LoadTrace(TorchDispatchMode):
    """Records copies from registered tensors into parameters inside the context."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        parameters = dict(model.named_parameters())
        self._sizes = {
            name: (value.numel(), value.shape[1:].numel()) for name, value in parameters.items() if value.numel()
        }
        self._owners = {value.untyped_storage().data_ptr(): name for name, value in parameters.items() if value.numel()}
        self._registered: list[_Sent] = []
        self._copied: dict[str, set[_Place]] = defaultdict(set)
        self._filled: dict[str, set[_Place]] = defaultdict(set)  # with a constant: padding
        self._untraceable: set[str] = set()
        self.pieces: dict[str, list[tuple[TensorSlice, _Place]]] = defaultdict(list)
        self.ignored: list[str] = []
        self.accepted: list[str] = []
        self.unwritten: list[str] = []
        self.padded: set[str] = set()  # parameters
        self.complete = False

    def register(self, weights: NamedWeights) -> Iterator[tuple[str, torch.Tensor]]:
        """Register the tensors that pass through."""
        for name, sent in weights:
            tensor = sent.contiguous()  # so that an offset in the storage is an offset in the tensor
            storage = tensor.untyped_storage().data_ptr()
            self._registered.append(_Sent(name, storage, _begin(tensor), tensor.nbytes))
            yield name, tensor

    def close(self, loaded: object) -> None:
        """Evaluate the trace.

        `loaded`: the parameters that vLLM reports as loaded. It may have loaded some by other means than a copy.
        """
        reported = loaded if isinstance(loaded, set) else set()
        unobserved = reported & set(self._sizes) - set(self._copied)
        sent = dict.fromkeys(tensor.name for tensor in self._registered)
        for name in self._untraceable:
            self.pieces.pop(name, None)
        untouched = [name for name in sent if name not in self.pieces and name not in self._untraceable]
        self.ignored = [] if unobserved else untouched
        self.accepted = [name for name in sent if name not in self.ignored]
        self.unwritten = [
            name
            for name, (size, row) in self._sizes.items()
            if name not in unobserved and is_partly_unwritten(size, row, self._copied[name], self._filled[name])
        ]
        self.padded = {name for name, places in self._filled.items() if places}
        self.complete = bool(self.pieces) and not self.ignored and not self.unwritten

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            owner = self._owners.get(args[0].untyped_storage().data_ptr())
            if owner is not None:
                self._record(owner, func, args)
        return func(*args, **(kwargs or {}))

    def _record(self, owner: str, func: Any, args: tuple[Any, ...]) -> None:
        target: torch.Tensor = args[0]
        size = target.untyped_storage().nbytes()
        place = _Place(owner, int(target.storage_offset()), tuple(target.shape), target.stride(), size)
        if func in _FILLS:
            self._filled[owner].add(place)
            return
        self._copied[owner].add(place)
        sent = self._origin(args[1]) if func is torch.ops.aten.copy_.default else None
        if sent is None or args[1].shape != target.shape:  # computed from a sent tensor, or from the old value
            written = [name for name, pieces in self.pieces.items() if any(at.parameter == owner for _, at in pieces)]
            self._untraceable.update(written or [tensor.name for tensor in self._registered[-1:]])
            return
        piece = TensorSlice(
            (_begin(args[1]) - sent.begin) // args[1].element_size(), tuple(args[1].shape), args[1].stride()
        )
        self.pieces[sent.name].append((piece, place))

    def _origin(self, source: torch.Tensor) -> _Sent | None:
        """Return the sent tensor that `source` is a part of.

        The newest ones are searched first, because memory of freed tensors is reused.
        """
        storage, begin = source.untyped_storage().data_ptr(), _begin(source)
        for sent in reversed(self._registered):
            if sent.storage == storage and sent.begin <= begin < sent.begin + sent.nbytes:
                return sent
        return None


def is_partly_unwritten(size: int, row: int, copied: Collection[_Place], filled: Collection[_Place]) -> bool:
    """Return True if a part of a parameter of this size was not written, apart from padding.

    `row`: the number of elements under one index of its first dimension.
    """
    stacked = row < size and all(place.offset // row == place.last // row for place in copied)
    if stacked:  # experts: each may be padded, all in the same way
        of_row = Counter({index: 0 for index in range(size // row)})
        for place in copied:
            of_row[place.offset // row] += place.numel
        return len(set(of_row.values())) > 1 or not copied
    return sum(place.numel for place in (*copied, *filled)) < size


_FILLS = {
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
}


def _begin(tensor: torch.Tensor) -> int:
    """Return the offset of the tensor in its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _exists(place: _Place, parameters: dict[str, torch.nn.Parameter]) -> bool:
    parameter = parameters.get(place.parameter)
    return parameter is not None and parameter.untyped_storage().nbytes() == place.storage_bytes


def _view(place: _Place, parameters: dict[str, torch.nn.Parameter]) -> torch.Tensor:
    return parameters[place.parameter].data.as_strided(place.shape, place.strides, place.offset)
