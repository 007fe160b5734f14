"""Recognise a full disk behind an error, and name it.

torch's and safetensors' writers replace "no space left on device" by messages such as "unexpected pos 704 vs 598", and
an error that comes from another process has lost its cause. If no error names the reason, `why_full` finds it out: it
writes a few megabytes to the same folder.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_REASONS = {
    errno.ENOSPC: "no space left on device",
    errno.EDQUOT: "the disk quota is exceeded",
    errno.EFBIG: "a file may not be larger (ulimit -f)",
}
_NUMBER_IN_TEXT = re.compile(r"\[Errno (\d+)\]|os error (\d+)")  # of Python and of Rust
_PROBE_BYTES = 2**24  # more than a failed write leaves free


class NoSpace(RuntimeError):
    """The disk is full, or a write would fill it. The message names the folder, the sizes and what to do."""


def reason_of(error: BaseException | None) -> str | None:
    """Return the reason that an error, or one that led to it, gives for a full disk; None: it has another reason."""
    while error is not None:
        found = [int(a or b) for a, b in _NUMBER_IN_TEXT.findall(str(error))]
        if isinstance(error, OSError) and error.errno is not None:
            found.append(error.errno)
        for number in found:
            if number in _REASONS:
                return _REASONS[number]
        error = error.__cause__ or error.__context__
    return None


def why_full(folder: Path) -> str | None:
    """Return the reason why a few megabytes cannot be written to a folder; None: they can."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        with probe.open("wb") as file:
            probe.unlink()  # at once, because this process may be killed meanwhile
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return reason_of(error)
    return None


@contextmanager
def naming_full_disk(path: Path, flag: str, advice: str) -> Iterator[None]:
    """Raise NoSpace instead of an error that a full disk has caused while `path` was written."""
    try:
        yield
    except Exception as error:
        reason = reason_of(error)
        if reason is None:
            raise
        raise NoSpace(
            f"no space: {flag} cannot write {path}: {reason}; {format_bytes(free_bytes(path.parent))} are free there; "
            f"{advice}"
        ) from error


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the file system that holds, or will hold, a folder."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def format_bytes(size: float) -> str:
    """Format 1234567 as "1.23 MB"."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}" if size < 999.5 * factor else f"{size / factor:.0f} {unit}"
    return f"{size:.0f} bytes"
