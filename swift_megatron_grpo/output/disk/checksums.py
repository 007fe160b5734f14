"""CRC-32 of bytes and files. It detects every flipped bit, and other accidental damage except for 1 in 4 billion.

It is no protection against intent. zlib computes 1.9 GiB/s on one core of a server, three times as fast as BLAKE2b, and
releases the interpreter's lock, so that threads compute several files in parallel.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

_CHUNK = 2**23  # bytes read at once


def checksum(data: bytes) -> str:
    """Return the CRC-32 as eight hexadecimal digits."""
    return f"{zlib.crc32(data):08x}"


def file_checksum(path: Path, sync: bool = False) -> str:
    """Return the CRC-32 of a file; with `sync`, also wait until the file is on disk."""
    value = 0
    with path.open("rb", buffering=0) as file:
        chunk = memoryview(bytearray(min(_CHUNK, os.fstat(file.fileno()).st_size + 1)))
        while size := file.readinto(chunk):
            value = zlib.crc32(chunk[:size], value)
        if sync:
            os.fsync(file.fileno())
    return f"{value:08x}"


def file_checksums(paths: Sequence[Path], threads: int, sync: bool = False) -> list[str]:
    """Return the CRC-32 of every file, in order."""
    with ThreadPoolExecutor(max(1, threads)) as pool:
        return list(pool.map(partial(file_checksum, sync=sync), paths))


def threads_of_a_rank(ranks_of_this_machine: int) -> int:
    """Return the number of threads for checksums on each rank: up to 4, if the machine has as many free cores."""
    return max(1, min(4, (os.cpu_count() or 1) // ranks_of_this_machine))
