"""A run that is refused ends with one message: the ranks write it to files, and torchrun ends them and prints it.

Otherwise every rank would print it with its traceback, and 40 lines of torchrun would follow. A rank that only waits
for another one, or reads the same flags, prints nothing.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDER = "SWIFT_MEGATRON_GRPO_REFUSALS"  # set by a torchrun with hooks, for its ranks
_SECONDS = 30.0  # in which torchrun ends a rank that has written its message; it looks ten times a second


def expect_refusals(environ: MutableMapping[str, str]) -> Path:
    """Name the folder for the messages of ranks that this process will start. A rank creates it."""
    folder = Path(tempfile.gettempdir()) / f"swift_megatron_grpo-{secrets.token_hex(8)}"
    environ[_FOLDER] = str(folder)
    return folder


@contextmanager
def reported_by_torchrun() -> Iterator[None]:
    """Leave the message of a ValueError to torchrun, which ends this process. Without its hooks the error is raised."""
    try:
        yield
    except ValueError as refusal:
        folder = os.environ.get(_FOLDER)
        if folder is not None:
            _write(Path(folder), str(refusal))
            time.sleep(_SECONDS)
        raise


def _write(folder: Path, message: str) -> None:
    with suppress(OSError):  # of a full disk: the error is raised after all
        folder.mkdir(mode=0o700, exist_ok=True)
        unfinished = folder / f"{os.getpid()}.part"
        unfinished.write_text(message, encoding="utf-8")
        unfinished.rename(folder / f"{int(os.environ.get('RANK', '0')):06}.txt")


def take_refusals(folder: Path) -> str | None:
    """Return the messages of the ranks so far, each once, and remove the folder; None: no rank was refused."""
    if not folder.is_dir():
        return None
    messages = [file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.txt"))]
    if not messages:
        return None
    shutil.rmtree(folder, ignore_errors=True)
    return "\n".join(dict.fromkeys(messages))
