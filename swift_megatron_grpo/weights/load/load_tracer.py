"""Traces how vLLM loads weights, so that the loaded tensors can be read back and compared.

vLLM fuses q, k and v, stacks experts, shards for tensor parallelism and pads, differently for every architecture. This
file contains no architecture: it traces the first load, in which each copy into a parameter shows which slice of which
tensor is written where.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from swift_megatron_grpo.weights.transport.buckets import NamedWeights
from swift_megatron_grpo.weights.transport.held_weights import TensorSlice

_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default}


class Place(NamedTuple):
    """A part of a parameter of the model."""

    parameter: str
    offset: int  # in elements of the parameter's storage
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_bytes: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def last(self) -> int:
        """Offset of its last element."""
        return self.offset + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the elements of the parameter at this place."""
        return parameter.data.as_strided(self.shape, self.strides, self.offset)


class TracedCopy(NamedTuple):
    """A slice of a sent tensor, and the place that a load has copied it to."""

    sent: str
    slice: TensorSlice
    place: Place


class _Sent(NamedTuple):
    """A tensor that is passed to the model's load_weights."""

    name: str
    storage: StorageWeakRef  # whose memory a later tensor may have: it may be freed once it is loaded
    begin: int  # in bytes: tensors of several types may share a storage
    nbytes: int


def loadable(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers, such as the bias of a router in a model of transformers that vLLM runs."""
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


class LoadTrace(TorchDispatchMode):
    """Records copies from registered tensors into parameters, or into tensors that stand for them, in its context."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        parameters = {name: value for name, value in model.named_parameters() if value.numel()}
        self._sizes = {name: (value.numel(), value.shape[1:].numel()) for name, value in parameters.items()}
        self._owners: dict[int, str] = {}  # by address
        self.adopt({name: value for name, value in loadable(model).items() if value.numel() and not value.is_meta})
        self._registered: list[_Sent] = []
        self._copied: dict[str, set[Place]] = defaultdict(set)
        self._filled: dict[str, set[Place]] = defaultdict(set)  # with a constant: padding
        self._elements = Counter[str]()  # that were copied or filled, by parameter
        self._untraceable: set[str] = set()
        self.copies: dict[str, list[TracedCopy]] = defaultdict(list)  # by the sent tensor
        self.copies_to: dict[str, list[TracedCopy]] = defaultdict(list)  # by the parameter
        self.discarded = 0  # elements that were written to the meta device
        self.computed: set[str] = set()  # parameters that were written with more than slices of sent tensors
        self.ignored: list[str] = []
        self.accepted: list[str] = []
        self.unwritten: list[str] = []
        self.padded: set[str] = set()  # parameters
        self.complete = False

    def register(self, weights: NamedWeights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, sent in weights:
            tensor = sent.contiguous()  # so that an offset in the storage is an offset in the tensor
            storage = StorageWeakRef(tensor.untyped_storage())
            self._registered.append(_Sent(name, storage, _begin(tensor), tensor.nbytes))
            yield name, tensor

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Count copies into these tensors as copies into the parameters of the same names."""
        self._owners |= {tensor.untyped_storage().data_ptr(): name for name, tensor in tensors.items()}

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Forget tensors whose memory will be reused."""
        for tensor in tensors:
            del self._owners[tensor.untyped_storage().data_ptr()]

    def is_full(self, parameter: str) -> bool:
        """Return True once as many elements were written as the parameter has."""
        return self._elements[parameter] >= self._sizes[parameter][0]

    def close(self, loaded: object) -> None:
        """Evaluate the trace. vLLM may load some of the parameters that it reports by other means than a copy."""
        reported = loaded if isinstance(loaded, set) else set()
        unobserved = reported & set(self._sizes) - set(self._copied)
        sent = dict.fromkeys(tensor.name for tensor in self._registered)
        for name in self._untraceable:
            self.copies.pop(name, None)
        untouched = [name for name in sent if name not in self.copies and name not in self._untraceable]
        self.ignored = [] if unobserved else untouched
        self.accepted = [name for name in sent if name not in self.ignored]
        self.unwritten = [
            name
            for name, (size, row) in self._sizes.items()
            if name not in unobserved and is_partly_unwritten(size, row, self._copied[name], self._filled[name])
        ]
        self.padded = {name for name, places in self._filled.items() if places}
        self.complete = bool(self.copies) and not self.unwritten

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            if args[0].is_meta:
                self.discarded += args[0].numel()
            owner = self._owners.get(args[0].untyped_storage().data_ptr())
            if owner is not None:
                self._record(owner, func, args)
        return func(*args, **(kwargs or {}))

    def _record(self, owner: str, func: Any, args: tuple[Any, ...]) -> None:
        target: torch.Tensor = args[0]
        size = target.untyped_storage().nbytes()
        place = Place(owner, int(target.storage_offset()), tuple(target.shape), target.stride(), size)
        written = self._filled if func in _FILLS else self._copied
        if place not in written[owner]:
            written[owner].add(place)
            self._elements[owner] += place.numel
        if func in _FILLS:
            return
        sent = self._origin(args[1]) if func is torch.ops.aten.copy_.default else None
        if sent is None or args[1].shape != target.shape:  # computed from a sent tensor, or from the old value
            self.computed.add(owner)
            names = [copy.sent for copy in self.copies_to[owner]]
            self._untraceable.update(names or [tensor.name for tensor in self._registered[-1:]])
            return
        offset = (_begin(args[1]) - sent.begin) // args[1].element_size()
        copy = TracedCopy(sent.name, TensorSlice(offset, tuple(args[1].shape), args[1].stride()), place)
        self.copies[sent.name].append(copy)
        self.copies_to[owner].append(copy)

    def _origin(self, source: torch.Tensor) -> _Sent | None:
        """Return the sent tensor that `source` is a part of, the newest one: a buffer may be received into again."""
        storage = StorageWeakRef(source.untyped_storage())
        begin = _begin(source)
        for sent in reversed(self._registered):
            if sent.storage == storage and sent.begin <= begin < sent.begin + sent.nbytes:
                return sent
        return None


def is_partly_unwritten(size: int, row: int, copied: Collection[Place], filled: Collection[Place]) -> bool:
    """Return True if a part was not written, apart from padding. `row`: elements under an index of dimension 0."""
    stacked = row < size and all(place.offset // row == place.last // row for place in copied)
    if stacked:  # experts: each may be padded, all in the same way
        of_row = Counter({index: 0 for index in range(size // row)})
        for place in copied:
            of_row[place.offset // row] += place.numel
        return len(set(of_row.values())) > 1 or not copied
    return sum(place.numel for place in (*copied, *filled)) < size


def _begin(tensor: torch.Tensor) -> int:
    """Return the offset of the tensor in its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.element_size()
