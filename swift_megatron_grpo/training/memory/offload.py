"""Groups of storages that are offloaded to host memory and reloaded together.

Their contents are copied to page-locked host memory and back on a separate stream, so that a reload overlaps with other
work of the GPU and of this process; work that reads the storages is ordered after it. Nothing here is collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from swift_megatron_grpo.training.memory.storages import Storages, as_bytes, total_bytes

# torch rounds page-locked allocations up to a power of two: one allocation per storage would waste up to half of it.
CHUNK = 64 << 20


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
            for content, chunk in self._spans(storages):
                chunk.copy_(content, non_blocking=True)
        self._stream.synchronize()

    def restore(self, storages: Storages) -> None:
        """Start copying the contents back; return at once."""
        self._stream.wait_stream(torch.cuda.current_stream())  # earlier work may still use this memory
        with torch.cuda.stream(self._stream):
            for content, chunk in self._spans(storages):
                content.copy_(chunk, non_blocking=True)
            self._restored = self._stream.record_event()

    def wait(self) -> None:
        """Make the current stream wait for the last `restore`."""
        if self._restored is not None:
            torch.cuda.current_stream().wait_event(self._restored)
            self._restored = None

    def _spans(self, storages: Storages) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        contents = [as_bytes(storage) for storage in storages]
        for span in split_over_chunks([len(content) for content in contents], CHUNK):
            yield (
                contents[span.storage][span.start : span.start + span.length],
                self._chunks[span.chunk][span.offset : span.offset + span.length],
            )

    def _grow(self, nbytes: int) -> None:
        while len(self._chunks) * CHUNK < nbytes:
            try:
                self._chunks.append(torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True))
            except RuntimeError as error:
                raise RuntimeError(
                    f"offloading {self._name} needs {nbytes / 2**30:.1f} GiB of page-locked host memory on every rank, "
                    f"and this rank could allocate only {len(self._chunks) * CHUNK / 2**30:.1f} GiB. Remove its "
                    "--offload_... flag and lower --vllm_gpu_memory_utilization, or run fewer ranks on this machine"
                ) from error


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """Part of a storage that is copied into one chunk: `length` bytes from `start`, at `offset` of the chunk."""

    storage: int
    start: int
    chunk: int
    offset: int
    length: int


def split_over_chunks(sizes: Sequence[int], chunk: int) -> Iterator[ChunkSpan]:
    """Lay storages of these sizes end to end over chunks of one size."""
    position = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            number, offset = divmod(position, chunk)
            length = min(size - start, chunk - offset)
            yield ChunkSpan(index, start, number, offset, length)
            start += length
            position += length


def _checksums(storages: Storages) -> list[int]:
    """Compute checksums on the GPU: reading a model there takes a millisecond, copying it a hundred."""
    words = [content.view(_word_type(len(content))) for content in map(as_bytes, storages)]
    if not words:
        return []
    sums: list[int] = torch.stack([content.sum(dtype=torch.int64) for content in words]).tolist()
    return sums


def _word_type(nbytes: int) -> torch.dtype:
    return torch.int32 if nbytes % 4 == 0 else torch.uint8
