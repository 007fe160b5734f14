"""Storages that leave the GPU together and come back together.

What they hold goes to page-locked host memory and back on a stream of its own, so that a copy back runs beside whatever
the GPU and this process do meanwhile; work that reads the storages is ordered behind it. Nothing here is collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from swift_megatron_grpo.training.memory.storages import Storages, as_bytes, total_bytes

# torch rounds page-locked memory up to a power of two, so that one piece for each storage would waste up to a half.
CHUNK = 64 << 20


class StorageGroup:
    """While it is away its storages are empty: nothing may read a view of them."""

    def __init__(self, name: str, find: Callable[[], Storages], host: HostCopy | None) -> None:
        self.name = name
        self._find = find  # anew each time it leaves: an optimizer's states come into being in its first step
        self._host = host  # None: what it holds is worth nothing, it comes back as zeros
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []  # and the sizes they had

    @property
    def is_offloaded(self) -> bool:
        return bool(self._emptied)

    def nbytes(self) -> int:
        """Of the GPU's memory, now or when it is back."""
        return sum(size for _, size in self._emptied) if self.is_offloaded else total_bytes(self._find())

    def offload(self) -> None:
        """The memory goes back to torch's allocator, not yet to the driver."""
        if self.is_offloaded:
            return
        storages = self._find()
        if self._host is not None:
            self._host.take(storages)
        self._emptied = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)

    def begin_reload(self) -> None:
        """Before the storages are read, also `finish_reload`."""
        if not self.is_offloaded:
            return
        for storage, size in self._emptied:
            storage.resize_(size)
        storages, self._emptied = [storage for storage, _ in self._emptied], []
        if self._host is not None:
            self._host.give(storages)
        else:
            for storage in storages:
                as_bytes(storage).zero_()

    def finish_reload(self) -> None:
        """What is asked of the GPU from here on waits for the copies; this process does not."""
        if self._host is not None:
            self._host.wait()


class HostCopy:
    """Page-locked memory for what storages hold, kept from one absence to the next."""

    def __init__(self, name: str, stream: torch.cuda.Stream, rarely_written: bool = False) -> None:
        self._name = name  # as a person knows it
        self._stream = stream
        self._rarely_written = rarely_written
        self._chunks: list[torch.Tensor] = []  # each [CHUNK] uint8
        self._holds: list[tuple[int, int]] = []  # storage and checksum of each one copied last, if rarely written
        self._arrived: torch.cuda.Event | None = None

    def take(self, storages: Storages) -> None:
        """Returns when it has what they hold."""
        if self._rarely_written:
            contents = list(zip([storage._cdata for storage in storages], _checksums(storages), strict=True))
            if contents == self._holds:
                return  # not written to since: the copy is still right
            self._holds = contents
        self._grow(total_bytes(storages))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for content, chunk in self._pieces(storages):
                chunk.copy_(content, non_blocking=True)
        self._stream.synchronize()

    def give(self, storages: Storages) -> None:
        """Returns at once."""
        self._stream.wait_stream(torch.cuda.current_stream())  # whatever used this memory before
        with torch.cuda.stream(self._stream):
            for content, chunk in self._pieces(storages):
                content.copy_(chunk, non_blocking=True)
            self._arrived = self._stream.record_event()

    def wait(self) -> None:
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
            self._arrived = None

    def _pieces(self, storages: Storages) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        contents = [as_bytes(storage) for storage in storages]
        for piece in split_over_chunks([len(content) for content in contents], CHUNK):
            yield (
                contents[piece.storage][piece.start : piece.start + piece.length],
                self._chunks[piece.chunk][piece.offset : piece.offset + piece.length],
            )

    def _grow(self, nbytes: int) -> None:
        while len(self._chunks) * CHUNK < nbytes:
            try:
                self._chunks.append(torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True))
            except RuntimeError as error:
                raise RuntimeError(
                    f"{self._name}: {nbytes / 2**30:.1f} GiB of page-locked host memory are needed on every rank, and "
                    f"this one got {len(self._chunks) * CHUNK / 2**30:.1f} GiB. Leave the --offload flag of "
                    "it out and lower --vllm_gpu_memory_utilization, or run fewer ranks on this machine"
                ) from error


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """`length` bytes from `start` of one storage lie at `offset` of one chunk."""

    storage: int
    start: int
    chunk: int
    offset: int
    length: int


def split_over_chunks(sizes: Sequence[int], chunk: int) -> Iterator[ChunkSpan]:
    """Storages of these sizes one behind the other over chunks of one size."""
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
    """Computed where they lie: reading a model there takes a millisecond, moving it a hundred."""
    words = [content.view(_word(len(content))) for content in map(as_bytes, storages)]
    if not words:
        return []
    sums: list[int] = torch.stack([each.sum(dtype=torch.int64) for each in words]).tolist()
    return sums


def _word(nbytes: int) -> torch.dtype:
    return torch.int32 if nbytes % 4 == 0 else torch.uint8
