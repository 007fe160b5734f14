"""Groups of storages that are offloaded to host memory and reloaded together.

Their contents are copied to page-locked host memory and back on a separate stream, so that a reload overlaps with other
work of the GPU and of this process; work that reads the storages is ordered after it. Nothing here is collective.

Storages, not tensors, are offloaded: Megatron's parameters and gradients are views of large buffers, tied weights share
one storage, and a storage that is emptied and filled again keeps every view of it valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

# torch rounds page-locked allocations up to a power of two: one allocation per storage would waste up to half of it.
CHUNK = 64 << 20
Storages = list[torch.UntypedStorage]


class StorageGroup:
    """Storages that move together. While the group is offloaded they are empty: nothing may read a view of them."""

    def __init__(self, name: str, find: Callable[[], Storages], host: HostCopy | None) -> None:
        self.name = name
        self._find = find  # called for every offload, because an optimizer creates its states in its first step
        self._host = host  # None: contents are not kept, and reloaded storages are zeros
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []  # with the sizes they had

    @property
    def is_offloaded(self) -> bool:
        return bool(self._emptied)

    def nbytes(self) -> int:
        """Return the GPU memory that the group takes, or will take again once it is reloaded."""
        return sum(size for _, size in self._emptied) if self.is_offloaded else total_bytes(self._find())

    def offload(self) -> None:
        """Copy the contents to the host and free the memory, for torch's allocator, not yet for the driver."""
        if self.is_offloaded:
            return
        storages = self._find()
        if self._host is not None:
            self._host.save(storages)
        self._emptied = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)

    def begin_reload(self) -> None:
        """Allocate the storages and start copying. Call `finish_reload` before anything reads them."""
        if not self.is_offloaded:
            return
        for storage, size in self._emptied:
            storage.resize_(size)
        storages = [storage for storage, _ in self._emptied]
        self._emptied = []
        if self._host is not None:
            self._host.restore(storages)
        else:
            for storage in storages:
                as_bytes(storage).zero_()

    def finish_reload(self) -> None:
        """Order later GPU work after the copies; this process does not wait."""
        if self._host is not None:
            self._host.wait()


class HostCopy:
    """Page-locked copy of storages. The memory is kept from one offload to the next."""

    def __init__(self, name: str, stream: torch.cuda.Stream, rarely_written: bool = False) -> None:
        self._name = name  # for error messages
        self._stream = stream
        self._rarely_written = rarely_written
        self._chunks: list[torch.Tensor] = []  # each [CHUNK] uint8
        self._saved: list[tuple[int, int]] = []  # storage and checksum of each one saved last, if rarely written
        self._restored: torch.cuda.Event | None = None

    def save(self, storages: Storages) -> None:
        """Copy the contents to the host; return once they have arrived."""
        if self._rarely_written:
            contents = list(zip([storage._cdata for storage in storages], _checksums(storages), strict=True))
            if contents == self._saved:
                return  # not written to since the last save: the copy is still valid
            self._saved = contents
        self._grow(total_bytes(storages))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for content, chunk in spans(map(as_bytes, storages), self._chunks):
                chunk.copy_(content, non_blocking=True)
        self._stream.synchronize()

    def restore(self, storages: Storages) -> None:
        """Start copying the contents back; return at once."""
        self._stream.wait_stream(torch.cuda.current_stream())  # earlier work may still use this memory
        with torch.cuda.stream(self._stream):
            for content, chunk in spans(map(as_bytes, storages), self._chunks):
                content.copy_(chunk, non_blocking=True)
            self._restored = self._stream.record_event()

    def wait(self) -> None:
        """Make the current stream wait for the last `restore`."""
        if self._restored is not None:
            torch.cuda.current_stream().wait_event(self._restored)
            self._restored = None

    def _grow(self, nbytes: int) -> None:
        while len(self._chunks) * CHUNK < nbytes:
            try:
                self._chunks.append(torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True))
            except RuntimeError as error:
                raise RuntimeError(
                    f"offloading the {self._name} needs {nbytes / 2**30:.1f} GiB of page-locked host memory on every "
                    f"rank, and this rank could allocate only {len(self._chunks) * CHUNK / 2**30:.1f} GiB. Remove its "
                    "--offload_... flag and lower --vllm_gpu_memory_utilization, or run fewer ranks on this machine"
                ) from error


def spans(
    contents: Iterable[torch.Tensor], chunks: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield parts of contents, which are laid end to end over chunks of one size, each with its part of a chunk."""
    free = iter(chunks)
    chunk = torch.empty(0)
    for content in contents:
        while len(content):
            if not len(chunk):
                chunk = next(free)
            length = min(len(content), len(chunk))
            yield content[:length], chunk[:length]
            content = content[length:]
            chunk = chunk[length:]


def _checksums(storages: Storages) -> list[int]:
    """Compute checksums on the GPU: reading a model there takes a millisecond, copying it a hundred."""
    contents = map(as_bytes, storages)
    words = [content.view(torch.int32 if len(content) % 4 == 0 else torch.uint8) for content in contents]
    return torch.stack([content.sum(dtype=torch.int64) for content in words]).tolist() if words else []


# ---- the storages of parameters, gradients and optimizer state


def trained_storages(models: Sequence[torch.nn.Module]) -> Storages:
    """Return the storages of trained parameters and of buffers: both may change in every step."""
    parameters = (p for model in models for p in model.parameters() if p.requires_grad)
    return distinct([*parameters, *_buffers(models)])


def frozen_storages(models: Sequence[torch.nn.Module]) -> Storages:
    """Return the storages of frozen parameters: the base of a LoRA adapter, frozen layers, a reference model."""
    frozen = distinct(p for model in models for p in model.parameters() if not p.requires_grad)
    return without(frozen, trained_storages(models))


def gradient_storages(models: Sequence[torch.nn.Module]) -> Storages:
    """Return the storages of Megatron's gradient buffers."""
    buffers = [
        buffer
        for model in models
        if isinstance(model, DistributedDataParallel)
        for buffer in [*model.buffers, *model.expert_parallel_buffers]
    ]
    # FP8 parameters may live in the gradient's buffer.
    return without(distinct(buffer.grad_data for buffer in buffers), trained_storages(models))


def optimizer_storages(optimizer: MegatronOptimizer, models: Sequence[torch.nn.Module]) -> Storages:
    """Return the storages of fp32 weights and of Adam's states, which it creates in its first step, of this rank."""
    tensors: list[torch.Tensor] = []
    for inner in torch_optimizers(optimizer):
        tensors += [parameter for group in inner.param_groups for parameter in group["params"]]
        if isinstance(inner, HybridDeviceOptimizer):  # --optimizer_cpu_offload: the share that stays on the GPU
            tensors += inner.param_to_fp32_param.values()
        tensors += [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
    # In fp32, and with the precision-aware optimizer, the optimizer updates the model's own weights.
    return without(distinct(tensors), trained_storages(models))


def torch_optimizers(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    """Return the torch optimizers: of dense and of expert weights; a pipeline stage without weights has none."""
    chain = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return (link.optimizer for link in chain if link.optimizer is not None)


def distinct(tensors: Iterable[torch.Tensor]) -> Storages:
    """Return the non-empty storages of tensors on the device, each once, in the order of the tensors."""
    device = torch.device(torch.cuda.current_device()).type
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device)
    return list({storage._cdata: storage for storage in storages if storage.nbytes()}.values())


def without(storages: Storages, others: Storages) -> Storages:
    excluded = {storage._cdata for storage in others}
    return [storage for storage in storages if storage._cdata not in excluded]


def total_bytes(storages: Iterable[torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages)


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a view of the storage, [nbytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _buffers(models: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for model in models:
        # Megatron's DDP wrapper hides Module.buffers() with an attribute.
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        yield from inner.buffers()
