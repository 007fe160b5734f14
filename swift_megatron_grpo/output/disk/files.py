"""Files that are complete on disk or do not exist, after a crash at any time, and checksums that detect damage.

CRC-32 detects every flipped bit, and other accidental damage except for 1 in 4 billion. It does not protect against
intent. zlib computes 1.9 GiB/s on one core of a server, three times as fast as BLAKE2b, and releases the interpreter's
lock, so that threads compute several files in parallel.
"""

import os
import stat
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path


def write_durably(path: Path, lines: Iterable[str]) -> None:
    """Write a text file. It gets its name only once its content is on disk; if that fails, no file is left."""
    unfinished = path.with_name(f"{path.name}.part")
    try:
        with unfinished.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        sync_folder(path.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def regular_size(path: Path) -> int:
    """Return the size of a regular file. Raise OSError for anything else: to open a named pipe would block for ever."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is not a regular file")
    return status.st_size


def read_regular(path: Path) -> str:
    """Return the text of a regular file; raise OSError for anything else, ValueError if it is not UTF-8."""
    regular_size(path)
    return path.read_text(encoding="utf-8")


def sync_folder(folder: Path) -> None:
    """Wait until the names of a folder's files are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    with ThreadPoolExecutor(max(1, threads)) as pool:
        return list(pool.map(partial(file_checksum, sync=sync), paths))


def threads_of_a_rank(ranks_of_this_machine: int) -> int:
    """Return the number of threads for checksums on each rank: up to 4, if the machine has as many free cores."""
    return max(1, min(4, (os.cpu_count() or 1) // ranks_of_this_machine))
