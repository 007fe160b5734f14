"""What a vLLM model holds of what it was sent, read back by the way in which it was loaded.

vLLM fuses q, k and v, stacks experts, cuts for tensor parallelism and pads, in every architecture's own way. None of
that is known here: the first load is watched, and each copy into a parameter says which piece of which tensor went
where.
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


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a piece lies in the model."""

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
        """Where its last element lies."""
        return self.offset + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True, slots=True)
class _Sent:
    name: str
    storage: int
    begin: int  # in bytes: tensors of several types may share a storage
    nbytes: int


class LoadedWeights:
    """Of the part of a model that one worker holds."""

    def __init__(self, model: Any, dtype: torch.dtype, engine: str) -> None:
        self._model = model
        self._dtype = dtype  # of the run; what is wider is compared in it
        self._engine = engine
        self._trace: _LoadTrace | None = None
        self._repacked: set[str] = set()  # what vLLM rearranges for a kernel once it is loaded
        self._as_written: dict[str, tuple[HeldSlice, ...]] = {}  # of these, what they were before

    @property
    def is_new(self) -> bool:
        return self._trace is None

    def load(self, weights: NamedWeights, finish: Callable[[], None], collect_checksums: bool) -> None:
        """model.load_weights and `finish`, what vLLM does to loaded weights. `collect_checksums`: all that was
        written can be told afterwards. The first load of these is watched, and the next ones until one was complete."""
        self._as_written = {}
        if not collect_checksums:
            self._model.load_weights(weights)
            finish()
        elif self._trace is None or not self._trace.complete:
            self._trace, self._repacked = _LoadTrace(self._model), set()
            with self._trace:
                loaded = self._model.load_weights(self._trace.announced(weights))
            self._trace.close(loaded)
            written = self._read(self._trace.pieces)
            finish()
            settled = self._read(self._trace.pieces)
            self._as_written = {name: held for name, held in written.items() if settled.get(name) != held}
            self._repacked = set(self._as_written)
        else:
            self._model.load_weights(weights)
            self._as_written = self._read(self._repacked)
            finish()

    def worker_weights(self) -> WorkerWeights:
        """After the first load with checksums."""
        assert self._trace is not None
        held = self._read(name for name in self._trace.pieces if name not in self._repacked) | self._as_written
        unreadable = [name for name in self._trace.taken if name not in held]
        return WorkerWeights(
            self._engine, held, tuple(self._trace.ignored), tuple(self._trace.unwritten), tuple(unreadable)
        )

    def _read(self, names: Iterable[str]) -> dict[str, tuple[HeldSlice, ...]]:
        """The tensors of these names, as far as they are where they were written."""
        assert self._trace is not None
        parameters = dict(self._model.named_parameters())
        found = {name: self._trace.pieces[name] for name in names}
        there = {
            name: pieces for name, pieces in found.items() if all(_there(place, parameters) for _, place in pieces)
        }
        numbers = iter(
            to_integers(
                checksum(_at(place, parameters), self._dtype, piece)
                for pieces in there.values()
                for piece, place in pieces
            )
        )
        return {name: tuple(HeldSlice(piece, next(numbers)) for piece, _ in pieces) for name, pieces in there.items()}


class _LoadTrace(TorchDispatchMode):
    """While open, notes what is copied from announced tensors into parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        parameters = dict(model.named_parameters())
        self._sizes = {
            name: (each.numel(), each.shape[1:].numel()) for name, each in parameters.items() if each.numel()
        }
        self._owners = {each.untyped_storage().data_ptr(): name for name, each in parameters.items() if each.numel()}
        self._announced: list[_Sent] = []
        self._copied: dict[str, set[_Place]] = defaultdict(set)
        self._filled: dict[str, set[_Place]] = defaultdict(set)  # with zeros: what no tensor is for
        self._untraceable: set[str] = set()
        self.pieces: dict[str, list[tuple[TensorSlice, _Place]]] = defaultdict(list)
        self.ignored: list[str] = []
        self.taken: list[str] = []
        self.unwritten: list[str] = []
        self.complete = False

    def announced(self, weights: NamedWeights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, sent in weights:
            tensor = sent.contiguous()  # places in the storage are then places in the tensor
            storage = tensor.untyped_storage().data_ptr()
            self._announced.append(_Sent(name, storage, _begin(tensor), tensor.nbytes))
            yield name, tensor

    def close(self, loaded: object) -> None:
        """`loaded`: the parameters that vLLM says it has loaded. It may have done so by other means than a copy."""
        told = loaded if isinstance(loaded, set) else set()
        unobserved = told & set(self._sizes) - set(self._copied)
        sent = dict.fromkeys(each.name for each in self._announced)
        for name in self._untraceable:
            self.pieces.pop(name, None)
        untouched = [name for name in sent if name not in self.pieces and name not in self._untraceable]
        self.ignored = [] if unobserved else untouched
        self.taken = [name for name in sent if name not in self.ignored]
        self.unwritten = [
            name
            for name, (size, row) in self._sizes.items()
            if name not in unobserved and lacks_a_piece(size, row, self._copied[name], self._filled[name])
        ]
        self.complete = bool(self.pieces) and not self.ignored and not self.unwritten

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            owner = self._owners.get(args[0].untyped_storage().data_ptr())
            if owner is not None:
                self._note(owner, func, args)
        return func(*args, **(kwargs or {}))

    def _note(self, owner: str, func: Any, args: tuple[Any, ...]) -> None:
        target: torch.Tensor = args[0]
        size = target.untyped_storage().nbytes()
        place = _Place(owner, int(target.storage_offset()), tuple(target.shape), target.stride(), size)
        if func in _FILLS:
            self._filled[owner].add(place)
            return
        self._copied[owner].add(place)
        sent = self._origin(args[1]) if func is torch.ops.aten.copy_.default else None
        if sent is None or args[1].shape != target.shape:  # computed from what was sent, or from what was there
            there = [name for name, pieces in self.pieces.items() if any(each.parameter == owner for _, each in pieces)]
            self._untraceable.update(there or [each.name for each in self._announced[-1:]])
            return
        piece = TensorSlice(
            (_begin(args[1]) - sent.begin) // args[1].element_size(), tuple(args[1].shape), args[1].stride()
        )
        self.pieces[sent.name].append((piece, place))

    def _origin(self, source: torch.Tensor) -> _Sent | None:
        """The newest first: memory of tensors that are gone is used again."""
        storage, begin = source.untyped_storage().data_ptr(), _begin(source)
        for sent in reversed(self._announced):
            if sent.storage == storage and sent.begin <= begin < sent.begin + sent.nbytes:
                return sent
        return None


def lacks_a_piece(size: int, row: int, copied: Collection[_Place], filled: Collection[_Place]) -> bool:
    """Whether a parameter of this size has a place that nothing was written to, other than padding. `row`: the size of
    what one index of its first dimension holds."""
    stacked = row < size and all(place.offset // row == place.last // row for place in copied)
    if stacked:  # experts: each may be padded, all alike
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
    """In its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _there(place: _Place, parameters: dict[str, torch.nn.Parameter]) -> bool:
    parameter = parameters.get(place.parameter)
    return parameter is not None and parameter.untyped_storage().nbytes() == place.storage_bytes


def _at(place: _Place, parameters: dict[str, torch.nn.Parameter]) -> torch.Tensor:
    return parameters[place.parameter].data.as_strided(place.shape, place.strides, place.offset)
